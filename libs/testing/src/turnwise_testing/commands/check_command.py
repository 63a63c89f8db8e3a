"""`turnwise check`: the conformance checks of a plugin without pytest, and simulated runs."""

from __future__ import annotations

import argparse
import json
import secrets

from turnwise.errors import ConfigError
from turnwise.protocols.command import FAILED, OK

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
_TASKS = "tasks"


class CheckCommand:
    """Run the checks that the conformance suites run, or simulated runs in random orders of events."""

    help = "run the conformance checks of a registered part, or of everything that a plugin registers"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `NAME [--config FILE] [a.b=c ...]`, and `--simulate [SCENARIO ...]` with its options."""
        parser.epilog = (
            "Examples:\n  turnwise check hermes\n  turnwise check tool_agent --timeout-s 10\n"
            "  turnwise check transformers --config examples/calculator.yaml\n"
            "  turnwise check tasks examples/shell_tasks --at-once 8\n"
            "  turnwise check --simulate --seeds 2000\n  turnwise check --simulate agent:tool_agent ./mine.py:Scenario"
        )
        parser.add_argument(
            "name", nargs="?", help="a registered name, a plugin's for all that it registers, or `tasks`"
        )
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value of the config; or a folder")
        parser.add_argument("--config", help="run config with the model and the options; engines need one")
        parser.add_argument("--timeout-s", type=float, default=60.0, help="longest time of one check (default: 60)")
        tasks = parser.add_argument_group("folders of graded tasks: turnwise check tasks FOLDER ...")
        tasks.add_argument("--form", default="harbor", help="form of the folders (default: harbor)")
        tasks.add_argument("--backend", default="bubblewrap", help="starts the workspaces (default: bubblewrap)")
        tasks.add_argument("--options", default="{}", help="options of the backend, as JSON")
        tasks.add_argument("--at-once", type=int, default=4, help="workspaces at once (default: 4)")
        tasks.add_argument(
            "--build",
            default="",
            metavar="COMMAND",
            help="first build each task's image from its Dockerfile by this command, such as 'podman build'; the "
            "folder names the images: 'FOLDER?image=local/{name}'",
        )
        simulation = parser.add_argument_group("simulated runs")
        simulation.add_argument(
            "--simulate",
            nargs="*",
            metavar="SCENARIO",
            help="simulate runs in random orders of events: rollouts, replicas, agent:NAME, agent:NAME:CONFIG, "
            "FILE.py:CLASS or MODULE:CLASS; without a name, rollouts and replicas",
        )
        simulation.add_argument("--seeds", type=int, default=200, help="runs of each scenario (default: 200)")
        simulation.add_argument("--first-seed", type=int, help="seed of the first run (default: random)")
        simulation.add_argument("--processes", type=int, default=1, help="processes that share the seeds (default: 1)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print a line for each check or scenario; return 1 when one failed."""
        if arguments.simulate is not None:
            return _simulate(arguments)
        if arguments.name == _TASKS:
            return _check_tasks(arguments)
        if arguments.name is None:
            raise ConfigError("check needs a registered name, or --simulate")
        from turnwise.config.resolve import load_resolved
        from turnwise.console import Console
        from turnwise.plugin.host import load
        from turnwise.runtime.build import RunBuilder
        from turnwise_testing.commands.check_run import run_checks

        config, host = load_resolved(arguments.config, arguments.overrides) if arguments.config else (None, load())
        resources = RunBuilder(config, host).resources if config else None
        console = Console()
        failed = 0
        for outcome in run_checks(host, arguments.name, config, resources, arguments.timeout_s):
            failed += outcome.verdict == "failed"
            reason = f"  ({outcome.reason})" if outcome.reason else ""
            console.print(f"{outcome.verdict:7}", style=_STYLES[outcome.verdict], highlight=False, end=" ")
            console.print(f"{outcome.name}: {outcome.check}{reason}", highlight=False)
            if outcome.verdict == "failed" and outcome.promise:
                console.print(f"        the promise: {outcome.promise}", highlight=False)
        return FAILED if failed else OK


def _check_tasks(arguments: argparse.Namespace) -> int:
    try:
        from turnwise_workspace_tasks.check_tasks import check_tasks
    except ImportError as error:
        raise ConfigError("check tasks needs turnwise-workspace-tasks: pip install turnwise-workspace-tasks") from error
    try:
        options = json.loads(arguments.options)
    except ValueError as error:
        raise ConfigError(f"--options: expected JSON, got {arguments.options!r}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"--options: expected an object, got {arguments.options!r}")
    return check_tasks(
        arguments.overrides,
        form=arguments.form,
        backend=arguments.backend,
        options=options,
        at_once=arguments.at_once,
        build=arguments.build,
    )


def _simulate(arguments: argparse.Namespace) -> int:
    from turnwise_testing.simulation.report import simulate_all

    if arguments.name is not None:
        raise ConfigError(f"the scenario comes after --simulate: --simulate agent:{arguments.name}")
    for name in ("seeds", "processes"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    # Other seeds each time, so that every call runs new orders; a failure prints its seed.
    first = secrets.randbelow(2**31) if arguments.first_seed is None else arguments.first_seed
    seeds = range(first, first + arguments.seeds)
    return FAILED if simulate_all(arguments.simulate, seeds, arguments.processes) else OK
