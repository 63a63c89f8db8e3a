"""`turnwise config show` and `turnwise config schema`."""

from __future__ import annotations

import argparse
import json

from turnwise.protocols.command import OK
from turnwise.terminal import write_output


class ConfigCommand:
    """Show a config with all defaults, or the JSON schema of configs."""

    help = "show a config with every default filled in, or the JSON schema of configs"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n  turnwise config show run.yaml rollout.n=4\n  turnwise config schema > turnwise.schema.json"
        )
        actions = parser.add_subparsers(metavar="ACTION", required=True)
        show = actions.add_parser("show", help="print the resolved config as YAML")
        show.add_argument("config", help="YAML or TOML file")
        show.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as rollout.n=4")
        show.set_defaults(action=_show)
        schema = actions.add_parser("schema", help="print the JSON schema, with the options of installed plugins")
        schema.set_defaults(action=_schema)

    def run(self, arguments: argparse.Namespace) -> int:
        text: str = arguments.action(arguments)
        write_output(text)
        return OK


def _show(arguments: argparse.Namespace) -> str:
    from turnwise.config.file import dump_yaml
    from turnwise.config.resolve import load_resolved

    config, _host = load_resolved(arguments.config, arguments.overrides)
    return dump_yaml(config)


def _schema(_arguments: argparse.Namespace) -> str:
    from turnwise.plugin.host import load
    from turnwise.types import PluginRecipe
    from turnwise_commands.config_schema import json_schema

    return json.dumps(json_schema(load(PluginRecipe())), indent=2) + "\n"
