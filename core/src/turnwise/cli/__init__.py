"""The command line: `turnwise COMMAND`. Every command is registered through the hook `register_commands`."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from turnwise.errors import ConfigError, DataError, PluginError, TemplateError, TurnwiseError
from turnwise.plugin.host import Host, load
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Command, Resources
from turnwise.protocols.command import BAD_INPUT, FAILED, INTERRUPTED
from turnwise.types import PluginRecipe


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run one command.

    Returns:
        0; 2 for a bad config or bad input, after one line on standard error; 130 when it was interrupted; 1 for
        anything else that failed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may have less than Unicode
    try:
        host = load(PluginRecipe())
        words = list(sys.argv[1:] if arguments is None else arguments)
        if words and not words[0].startswith("-"):
            host.entry("commands", words[0])  # whose error has the package to install, which argparse's has not
        options = _parsed(make_parser(host), words)
        command: Command = options.command
        return command.run(options)
    except TurnwiseError as error:
        sys.stderr.write(f"turnwise: error: {error}\n")
        return exit_code_of(error)
    except KeyboardInterrupt:
        sys.stderr.write("turnwise: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as `turnwise show | head` does.
        sys.stderr.close()
        return FAILED


def make_parser(host: Host) -> argparse.ArgumentParser:
    """Return the parser with one subcommand per registered command."""
    parser = argparse.ArgumentParser(
        prog="turnwise",
        description="Run multi-turn language-model agents for reinforcement learning.",
        epilog="Examples:\n  turnwise plugins\n  turnwise rollout run.yaml --out runs/first\n\n"
        'Packages add commands. The extra of a command has its package: pip install "turnwise[rollout]"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, entry in host.commands.entries().items():
        command = entry.factory(NoConfig(), Resources())
        sub = subparsers.add_parser(
            name, help=command.help, description=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(sub)
        sub.set_defaults(command=command, parser=sub)
    return parser


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; values that are set behind an option count too, which argparse leaves over."""
    options, left = parser.parse_known_args(arguments)
    if left:
        if not hasattr(options, "overrides") or any(each.startswith("-") or "=" not in each for each in left):
            options.parser.error(f"unrecognized arguments: {' '.join(left)}")
        options.overrides = [*options.overrides, *left]
    return options


def exit_code_of(error: TurnwiseError) -> int:
    """Return 2 for an error that the user can fix in a file or on the command line, 1 for any other."""
    return BAD_INPUT if isinstance(error, ConfigError | DataError | PluginError | TemplateError) else FAILED
