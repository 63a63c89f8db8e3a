"""`turnwise eval`: evaluates a model on held-out tasks."""

from __future__ import annotations

import argparse
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from turnwise.errors import ConfigError
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Resources
from turnwise.protocols.command import INTERRUPTED, OK
from turnwise.terminal import write_error

if TYPE_CHECKING:
    from turnwise import EpisodeResult
    from turnwise_grpo_trainer.train_setup import TrainSetup

_EPILOG: Final = """\
Examples:
  turnwise eval examples/train_calculator.yaml
  turnwise eval examples/train_calculator.yaml rollout.validation_n=16 --k 1,4,16 --out runs/eval
  turnwise eval examples/train_calculator.yaml model.path=$PWD/runs/train/model
  turnwise eval --resume runs/eval --k 1,4,16

The command runs the tasks of data.validation_path, rollout.validation_n episodes each, with
rollout.validation_sampling. A path in an override is relative to the folder of the config, hence the $PWD.
--out writes the results to {file}, and the episodes as `turnwise rollout` does, so that `turnwise show` and
others read them. Ctrl-C or SIGTERM keeps what has finished; --resume DIR continues such a run or a killed one, and
computes the results of a complete run again.
pass@k is the unbiased estimator. The intervals are 95 % bootstrap intervals over tasks; below 20 tasks they are too
narrow. Failed and unscored episodes are excluded; pass@k also excludes tasks with fewer than k scored episodes. Lines
below the table count them. If the engine or the infrastructure lost most episodes, there is no table: --resume DIR
--retry-failed runs the lost ones again.
Exit codes: 0; 2 for a bad config or bad input; 130 if interrupted; 1 if it failed.
"""


class EvalCommand:
    """Rolls out held-out tasks and reports how many are solved."""

    help = "run the held-out tasks of a config: mean@n and pass@k with confidence intervals"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        pass

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from turnwise_result_files.folder_arguments import add_folder_arguments
        from turnwise_result_files.resumption import EVALUATION_FILE

        parser.epilog = _EPILOG.format(file=EVALUATION_FILE)
        add_folder_arguments(parser)
        parser.add_argument("--k", default="1", metavar="K[,K...]", help="values of k for pass@k (default: 1)")
        parser.add_argument(
            "--threshold", type=float, default=1.0, help="least reward of a solved episode (default: 1)"
        )
        parser.add_argument(
            "--step", type=int, help="training step, from which seeds are derived (default: rollout.global_step)"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise.console import Console
        from turnwise.files import write_text
        from turnwise_grpo_trainer.loop.evaluation import evaluate_episodes, exclusion_notes, results_table
        from turnwise_result_files.folder_lock import writing_to
        from turnwise_result_files.resumption import EVALUATION_FILE, refuse_failures
        from turnwise_result_files.summary import note_truncations

        ks = _parse_ks(arguments.k)
        if not math.isfinite(arguments.threshold):
            raise ConfigError(f"--threshold {arguments.threshold}: expected a finite number")
        if arguments.step is not None and arguments.step < 0:
            raise ConfigError(f"--step {arguments.step}: expected at least 0")
        setup = _read_setup(arguments)
        n = setup.run.rollout.validation_n
        if max(ks) > n:
            raise ConfigError(f"--k {max(ks)}: rollout.validation_n is only {n}")
        folder = arguments.resume or arguments.out
        episodes = roll_out(setup) if folder is None else roll_out_to(folder, setup, arguments)
        if episodes is None:
            with suppress(OSError):  # Ctrl-C ends the reader of a pipe too
                write_error(f"turnwise: interrupted; to run the rest: turnwise eval --resume {folder}\n")
            return INTERRUPTED
        refuse_failures(episodes, "" if folder is None else f"turnwise eval --resume {folder} --retry-failed")
        report = evaluate_episodes(episodes, n=n, ks=ks, threshold=arguments.threshold, seed=setup.run.rollout.seed)
        console = Console()
        console.print(results_table(report))
        truncations = note_truncations(episodes)
        for note in (*exclusion_notes(report), *([truncations] if truncations else [])):
            console.print(note, soft_wrap=True)
        if folder is not None:
            with writing_to(folder, f"turnwise eval --resume {folder} writes the results"):
                write_text(folder / EVALUATION_FILE, json.dumps(report, indent=2) + "\n")
            console.print(f"wrote {folder}; to look at one episode: turnwise show {folder} 0", soft_wrap=True)
        return OK


def _read_setup(arguments: argparse.Namespace) -> TrainSetup:
    """Return the checked config, whose rollout section asks for held-out tasks and has the step."""
    from attrs import evolve

    from turnwise_grpo_trainer.train_setup import read_setup
    from turnwise_result_files.folder_arguments import check_same_config, config_path

    path = config_path(arguments, needs_out=False)
    if arguments.resume is not None and arguments.config is None and arguments.step is not None:
        raise ConfigError("--step: --resume DIR continues with the step of that run")
    setup = read_setup(path, arguments.overrides, needs_train=False, with_logging=True)
    if not setup.validation_tasks:
        example = "for example data.validation_path=questions.jsonl"
        raise ConfigError(f"{path}: data.validation_path: missing; eval needs a file of held-out tasks, {example}")
    rollout = setup.run.rollout
    step = rollout.global_step if arguments.step is None else arguments.step
    setup = evolve(setup, run=evolve(setup.run, rollout=evolve(rollout, global_step=step, validation=True)))
    return evolve(setup, run=check_same_config(arguments, setup.run))


def roll_out(setup: TrainSetup) -> list[EpisodeResult]:
    """Roll out the held-out tasks, and keep their episodes in memory only."""
    from turnwise import RolloutManager

    manager = RolloutManager.from_config(setup.run, setup.host)
    manager.check_prompts(setup.validation_tasks, key="data.validation_path")
    with manager:
        return manager.rollout(setup.validation_tasks, global_step=setup.run.rollout.global_step, validation=True)


def roll_out_to(folder: Path, setup: TrainSetup, arguments: argparse.Namespace) -> list[EpisodeResult] | None:
    """Roll out the held-out tasks to a folder; return their episodes, or None after an interrupt."""
    from turnwise_result_files.folder_arguments import existing_results
    from turnwise_result_files.run_folder import run_in_folder

    existing = existing_results(arguments)
    run = run_in_folder(folder, setup.run, setup.host, setup.validation_tasks, existing)
    return None if run.interrupted else run.results


def _parse_ks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--k {text}: expected positive integers, such as 1,8")
    return sorted({int(part) for part in parts})
