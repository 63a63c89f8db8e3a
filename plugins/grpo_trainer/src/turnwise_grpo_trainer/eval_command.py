"""`turnwise eval`: held-out results of a model."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError
from turnwise.protocols import Resources
from turnwise.registry import NoConfig

OK: Final = 0
_EPILOG: Final = """\
Examples:
  turnwise eval examples/train_calculator.yaml
  turnwise eval examples/train_calculator.yaml rollout.validation_n=16 --k 1,4,16 --out runs/eval.json
  turnwise eval examples/train_calculator.yaml model.path=$PWD/runs/train/model

It runs the tasks of data.validation_path, rollout.validation_n episodes each, with rollout.validation_sampling.
A path is relative to the folder of the config, hence the $PWD.
pass@k is the unbiased estimator; the intervals are 95 % bootstrap intervals over tasks, too narrow below 20 tasks.
Episodes that failed or have no score are left out, and of pass@k the tasks with fewer than k scored ones; lines below
the table say how many.
Exit codes: 0; 2 for a bad config or bad input; 130 when it was interrupted; 1 when it failed.
"""


class EvalCommand:
    """Run held-out tasks and say how many are solved."""

    help = "run the held-out tasks of a config: mean@n and pass@k with confidence intervals"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """Take nothing: the options are on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `CONFIG [a.b=c ...] [--k 1,8] [--out FILE]`."""
        parser.epilog = _EPILOG
        parser.add_argument("config", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as rollout.validation_n=8")
        parser.add_argument("--k", default="1", metavar="K[,K...]", help="for which k to give pass@k (default: 1)")
        parser.add_argument(
            "--threshold", type=float, default=1.0, help="reward from which on it is right (default: 1)"
        )
        parser.add_argument("--step", type=int, default=0, help="training step that the seeds are of (default: 0)")
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Roll out, print the table and write the file."""
        from rich.console import Console

        from turnwise import configure_logging
        from turnwise_grpo_trainer.evaluation import evaluated, notes, results_table
        from turnwise_grpo_trainer.numbers import refuse_all_failed
        from turnwise_grpo_trainer.setup import read_setup

        ks = _ks(arguments.k)
        setup = read_setup(arguments.config, arguments.overrides, needs_train=False)
        configure_logging(setup.run.telemetry.log_level, setup.run.telemetry.log_format)
        if not setup.validation_tasks:
            raise ConfigError(f"{arguments.config}: data.validation_path: missing; there is nothing to evaluate")
        n = setup.run.rollout.validation_n
        if max(ks) > n:
            raise ConfigError(f"--k {max(ks)}: rollout.validation_n is only {n}")
        if arguments.out is not None:
            _refuse_unwritable(arguments.out)
        with setup.manager() as manager:
            episodes = manager.rollout(setup.validation_tasks, global_step=arguments.step, validation=True)
        refuse_all_failed(episodes)
        report = evaluated(episodes, n=n, ks=ks, threshold=arguments.threshold, seed=setup.run.rollout.seed)
        console = Console()
        console.print(results_table(report))
        for note in notes(report):
            console.print(note, soft_wrap=True)
        if arguments.out is not None:
            partial = _partial(arguments.out)
            partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            os.replace(partial, arguments.out)
        return OK


def _partial(out: Path) -> Path:
    return Path(f"{out}.partial")


def _refuse_unwritable(out: Path) -> None:
    """Make the folder of a file and write there, so that a rollout does not end with results that have no place."""
    probe = _partial(out)
    try:
        if out.exists() and not out.is_file():
            raise ConfigError(f"--out {out}: not a file")
        out.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}: {error.filename}") from error


def _ks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--k {text}: expected numbers from 1, such as 1,8")
    return sorted({int(part) for part in parts})
