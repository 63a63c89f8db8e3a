"""The command `turnwise workspaces`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from turnwise import NoConfig, PluginRecipe, Resources
from turnwise.config.parts import Choice
from turnwise.errors import ConfigError
from turnwise.terminal import write_output
from turnwise_workspaces.backends import KIND
from turnwise_workspaces.workspace import Orphan, WorkspaceBackend


class WorkspacesCommand:
    """Finds and removes what killed runs have left on this machine."""

    help = "find or remove the leftovers of killed runs"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """All options are on the command line."""
        self._resources = resources

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "Examples:\n  turnwise workspaces find\n  turnwise workspaces reap --backend bubblewrap"
        parser.add_argument("action", choices=["find", "reap"], help="list the leftovers, or remove them")
        parser.add_argument("--backend", action="append", help="only this one; default: all")
        parser.add_argument("--options", default="{}", help="options of the backends, as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        import asyncio  # the list of commands is fast without it

        from turnwise.config.resolve import build_part
        from turnwise.plugin.host import load

        host, options = load(PluginRecipe()), _read_options(arguments.options)
        for name in arguments.backend or host.registry(KIND).names():
            backend: WorkspaceBackend = build_part(host, KIND, Choice(name, options), self._resources, path="backend")
            is_removed = arguments.action == "reap"
            found = asyncio.run(_find(backend, is_removed))
            lines = [f"{name}: {'removed' if is_removed else 'found'} {each.name} of {each.owner}\n" for each in found]
            write_output("".join(lines) or f"{name}: nothing is left\n")
        return 0


def _read_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--options: expected JSON, got {text!r}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--options: expected an object, got {text!r}")
    return options


async def _find(backend: WorkspaceBackend, is_removed: bool) -> list[Orphan]:
    return list(await (backend.reap() if is_removed else backend.find_orphans()))
