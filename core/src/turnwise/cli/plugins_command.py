"""`turnwise plugins`: installed plugins, their registrations, and the broken ones."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from turnwise.plugin.host import Host, load
from turnwise.plugin.requirements import InstalledDistributions
from turnwise.protocols.command import OK
from turnwise.terminal import write_output
from turnwise.types import JsonDict, PluginRecipe

if TYPE_CHECKING:
    from rich.table import Table


class PluginsCommand:
    """List every plugin; nothing heavy is imported."""

    help = "list plugins with their versions, registrations and load errors"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "Examples:\n  turnwise plugins\n  turnwise plugins --json"
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise.console import Console

        host = load(PluginRecipe())
        if arguments.json:
            write_output(json.dumps({"plugins": plugin_rows(host)}, indent=2) + "\n")
        else:
            Console().print(_table(host))
        return OK


def plugin_rows(host: Host) -> list[JsonDict]:
    """Return one JSON object per plugin, sorted by name."""
    distributions = InstalledDistributions()
    return [
        {
            "name": plugin.name,
            "distribution": plugin.distribution,
            "version": plugin.version,
            "module": plugin.module,
            "state": plugin.state,
            "error": plugin.error,
            "unmet_requirements": list(distributions.unmet_requirements(plugin.distribution)),
            "registers": {kind: list(names) for kind, names in plugin.registers.items()},
            "wraps": list(plugin.wraps),
        }
        for plugin in host.plugins
    ]


def _table(host: Host) -> Table:
    from rich.table import Table

    table = Table("plugin", "version", "state", "registers")
    distributions = InstalledDistributions()
    for plugin in host.plugins:
        lines = [f"{kind}: {', '.join(names)}" for kind, names in plugin.registers.items()]
        lines += [f"wraps {', '.join(plugin.wraps)}"] if plugin.wraps else []
        lines += [f"needs {text}" for text in distributions.unmet_requirements(plugin.distribution)]
        for kind in host.kinds:
            shared = [name for name in plugin.registers.get(kind, ()) if len(host.registry(kind).owners(name)) > 1]
            lines += [f"{kind}: {name} is registered by several plugins, and none has it" for name in shared]
        text = f"{plugin.error}{plugin.hint}" if plugin.error else "\n".join(lines)
        table.add_row(plugin.name, plugin.version, plugin.state, text)
    return table
