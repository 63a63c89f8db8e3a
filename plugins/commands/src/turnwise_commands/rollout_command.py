"""`turnwise rollout`: runs a config's tasks and writes trajectories, batch and metrics."""

from __future__ import annotations

import argparse
from pathlib import Path


class RolloutCommand:
    """Run tasks through agents and keep their trajectories."""

    help = "run the tasks of a config and write trajectories, a batch and metrics"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from turnwise_result_files.folder_arguments import add_folder_arguments
        from turnwise_result_files.resumption import (
            BATCH_FILE,
            CONFIG_FILE,
            METRICS_FILE,
            TRAJECTORIES_FILE,
            UNFINISHED_FILE,
        )

        parser.epilog = (
            "Examples:\n"
            "  turnwise rollout run.yaml --out runs/first\n"
            "  turnwise rollout run.yaml rollout.n=8 rollout.seed=1 --out runs/groups\n"
            "  turnwise rollout run.yaml --out runs/traced --trace runs/traced/trace.json\n\n"
            f"Writes {TRAJECTORIES_FILE}, {BATCH_FILE}, {METRICS_FILE} and {CONFIG_FILE}. Ctrl-C or SIGTERM stops\n"
            f"the running episodes, writes all finished ones, and saves the others to {UNFINISHED_FILE}; a second\n"
            "one exits without waiting. --resume DIR continues a run that was interrupted or killed: finished\n"
            "episodes are kept, and the others run to their end. A job may always give CONFIG and --resume DIR: it\n"
            "starts the run if DIR holds none. With --retry-failed, episodes that failed by an\n"
            "engine or by the infrastructure run again as well.\n"
            "Exit codes: 0; 2 for a bad config or bad input; 130 after an interrupt; 1 when every episode failed, or\n"
            "most of them by the engine or the infrastructure."
        )
        add_folder_arguments(parser)
        parser.add_argument("--trace", type=Path, metavar="FILE", help="draw the run for https://ui.perfetto.dev")

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_commands.rollout import run_rollout

        return run_rollout(arguments)
