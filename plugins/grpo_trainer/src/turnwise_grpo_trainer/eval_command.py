"""`turnwise eval`: evaluates a model on held-out tasks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turnwise import EpisodeResult
from turnwise.errors import ConfigError
from turnwise.files import partial_path, write_text
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Resources

if TYPE_CHECKING:
    from turnwise_grpo_trainer.train_setup import TrainSetup

OK: Final = 0
_EPILOG: Final = """\
Examples:
  turnwise eval examples/train_calculator.yaml
  turnwise eval examples/train_calculator.yaml rollout.validation_n=16 --k 1,4,16 --out runs/eval.json
  turnwise eval examples/train_calculator.yaml model.path=$PWD/runs/train/model

The command runs the tasks of data.validation_path, rollout.validation_n episodes each, with
rollout.validation_sampling. A path in an override is relative to the folder of the config, hence the $PWD.
pass@k is the unbiased estimator. The intervals are 95 % bootstrap intervals over tasks; below 20 tasks they are too
narrow. Failed and unscored episodes are excluded; pass@k also excludes tasks with fewer than k scored episodes. Lines
below the table count them.
Exit codes: 0; 2 for a bad config or bad input; 130 if interrupted; 1 if it failed.
"""


class EvalCommand:
    """Rolls out held-out tasks and reports how many are solved."""

    help = "run the held-out tasks of a config: mean@n and pass@k with confidence intervals"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        pass

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.add_argument("config", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as rollout.validation_n=8")
        parser.add_argument("--k", default="1", metavar="K[,K...]", help="values of k for pass@k (default: 1)")
        parser.add_argument(
            "--threshold", type=float, default=1.0, help="least reward of a solved episode (default: 1)"
        )
        parser.add_argument(
            "--step", type=int, default=0, help="training step, from which seeds are derived (default: 0)"
        )
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        from rich.console import Console

        from turnwise import configure_logging
        from turnwise_grpo_trainer.episode_metrics import check_not_all_failed
        from turnwise_grpo_trainer.evaluation import evaluate_episodes, exclusion_notes, results_table
        from turnwise_grpo_trainer.train_setup import read_setup

        ks = _parse_ks(arguments.k)
        setup = read_setup(arguments.config, arguments.overrides, needs_train=False)
        configure_logging(setup.run.telemetry.log_level, setup.run.telemetry.log_format)
        if not setup.validation_tasks:
            raise ConfigError(f"{arguments.config}: data.validation_path: missing; eval needs held-out tasks")
        n = setup.run.rollout.validation_n
        if max(ks) > n:
            raise ConfigError(f"--k {max(ks)}: rollout.validation_n is only {n}")
        if arguments.out is not None:
            _check_writable(arguments.out)
        episodes = roll_out(setup, arguments.step)
        check_not_all_failed(episodes)
        report = evaluate_episodes(episodes, n=n, ks=ks, threshold=arguments.threshold, seed=setup.run.rollout.seed)
        console = Console()
        console.print(results_table(report))
        for note in exclusion_notes(report):
            console.print(note, soft_wrap=True)
        if arguments.out is not None:
            write_text(arguments.out, json.dumps(report, indent=2) + "\n")
        return OK


def roll_out(setup: TrainSetup, step: int) -> list[EpisodeResult]:
    """Roll out the held-out tasks, with the seeds of a training step."""
    from turnwise import RolloutManager

    with RolloutManager.from_config(setup.run, setup.host) as manager:
        return manager.rollout(setup.validation_tasks, global_step=step, validation=True)


def _check_writable(out: Path) -> None:
    """Create the folder of a file and test that it is writable, so that the results of a long rollout are not lost."""
    probe = partial_path(out)
    try:
        if out.exists() and not out.is_file():
            raise ConfigError(f"--out {out}: not a file")
        out.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}: {error.filename}") from error


def _parse_ks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--k {text}: expected positive integers, such as 1,8")
    return sorted({int(part) for part in parts})
