"""`turnwise check`: the conformance checks of a plugin, without pytest."""

from __future__ import annotations

import argparse

from rich.console import Console

from turnwise.config.resolve import load_resolved
from turnwise.plugin.host import load
from turnwise.protocols.command import FAILED, OK
from turnwise.runtime.build import RunBuilder

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


class CheckCommand:
    """Run the checks that the conformance suites run."""

    help = "run the conformance checks of a registered part, or of everything that a plugin registers"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `NAME [--config FILE] [a.b=c ...]`."""
        parser.epilog = (
            "Examples:\n  turnwise check hermes\n  turnwise check tool_agent --timeout-s 10\n"
            "  turnwise check transformers --config examples/calculator.yaml"
        )
        parser.add_argument("name", help="a registered name, or a plugin's for all that it registers")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value of the config")
        parser.add_argument("--config", help="run config with the model and the options; engines need one")
        parser.add_argument("--timeout-s", type=float, default=60.0, help="longest time of one check (default: 60)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print a line per check; 1 when one failed."""
        from turnwise_testing.check_run import run_checks

        config, host = load_resolved(arguments.config, arguments.overrides) if arguments.config else (None, load())
        resources = RunBuilder(config, host).resources if config else None
        console = Console()
        failed = 0
        for outcome in run_checks(host, arguments.name, config, resources, arguments.timeout_s):
            failed += outcome.verdict == "failed"
            reason = f"  ({outcome.reason})" if outcome.reason else ""
            console.print(f"[{_STYLES[outcome.verdict]}]{outcome.verdict:7}[/]", end=" ")
            console.print(f"{outcome.name}: {outcome.check}{reason}", markup=False, highlight=False)
            if outcome.verdict == "failed" and outcome.promise:
                console.print(f"        the promise: {outcome.promise}", markup=False, highlight=False)
        return FAILED if failed else OK
