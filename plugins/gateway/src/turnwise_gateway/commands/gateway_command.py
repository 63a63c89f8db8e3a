"""`turnwise gateway`: the subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Protocol


class Subcommand(Protocol):
    """A subcommand of `turnwise gateway`."""

    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


def build_subcommands() -> Mapping[str, Subcommand]:
    """Return the subcommands by name; they import servers and engines, which a list of commands does not need."""
    from turnwise_gateway.commands.replay_command import ReplayCommand
    from turnwise_gateway.commands.serve_command import ServeCommand

    return {"serve": ServeCommand(), "replay": ReplayCommand()}


class GatewayCommand:
    """Serves models to agents outside, and looks after what they leave."""

    help = "serve a model to agents outside, and replay sessions"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "Examples:\n  turnwise gateway serve run.yaml --out runs/served\n  turnwise gateway serve --help"
        )
        subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
        for name, command in build_subcommands().items():
            sub = subparsers.add_parser(
                name, help=command.help, description=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            command.add_arguments(sub)
            sub.set_defaults(subcommand=command)

    def run(self, arguments: argparse.Namespace) -> int:
        subcommand: Subcommand = arguments.subcommand
        return subcommand.run(arguments)
