"""`turnwise train`: train a model on the tasks of a config."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from turnwise.errors import ConfigError
from turnwise.protocols import Resources
from turnwise.registry import NoConfig

if TYPE_CHECKING:
    from turnwise_grpo_trainer.setup import Setup

OK: Final = 0
INTERRUPTED: Final = 130
_EPILOG: Final = """\
Examples:
  turnwise train examples/train_calculator.yaml --out runs/train
  turnwise train examples/train_calculator.yaml --dry-run
  turnwise train examples/train_calculator.yaml train.num_steps=5 rollout.n=4 --out runs/short
  turnwise train examples/train_calculator.yaml --out runs/train --resume

CONFIG is a run config, as `turnwise rollout` takes it, with a section `train`. It writes metrics.jsonl, tensorboard/,
checkpoints/, the trained model in model/, curve.png, and report.md with held-out results before and after.
An interrupt (Ctrl-C, SIGTERM) cuts the running episodes and writes a checkpoint with what there is, from which --resume
goes on; a second one ends at once.
Exit codes: 0; 2 for a bad config or bad input; 130 when it was interrupted; 1 when it failed.
"""


class TrainCommand:
    """Train a model on the tasks of a config."""

    help = "train a model on the tasks of a config"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        """Take nothing: the options are on the command line."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare `CONFIG [a.b=c ...] --out DIR`."""
        parser.epilog = _EPILOG
        parser.add_argument("config", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as train.num_steps=5")
        parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; made when missing")
        parser.add_argument("--overwrite", action="store_true", help="begin anew in a DIR that holds a training")
        parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint of DIR")
        parser.add_argument("--shuffle-rewards", action="store_true", help="a control that must not learn")
        parser.add_argument("--dry-run", action="store_true", help="check the config, print the plan and stop")

    def run(self, arguments: argparse.Namespace) -> int:
        """Train, or print the plan."""
        overrides = [*arguments.overrides, *(["train.shuffle_rewards=true"] if arguments.shuffle_rewards else [])]
        try:
            from turnwise import configure_logging
            from turnwise_grpo_trainer.setup import checked_out, read_setup
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"turnwise train needs {error.name}: pip install 'turnwise-grpo-trainer[train]'"
            ) from error
        setup = read_setup(arguments.config, overrides)
        configure_logging(setup.run.telemetry.log_level, setup.run.telemetry.log_format)
        if arguments.dry_run:
            from turnwise_grpo_trainer.placement import print_plan

            print_plan(setup)
            return OK
        if arguments.out is None:
            raise ConfigError("--out: missing; say where to write, or add --dry-run")
        out = checked_out(arguments.out, overwrite=arguments.overwrite, resume=arguments.resume)
        return _train(setup, out, resume=arguments.resume)


def _train(setup: Setup, out: Path, *, resume: bool) -> int:
    import sys

    from rich.console import Console

    from turnwise_grpo_trainer.checkpoints import checkpoints_of, remove_checkpoints, step_of
    from turnwise_grpo_trainer.checkpoints import resume as go_on
    from turnwise_grpo_trainer.interrupts import interrupts
    from turnwise_grpo_trainer.live_view import TrainView
    from turnwise_grpo_trainer.loop import TrainingInterruptedError
    from turnwise_grpo_trainer.metric_log import MetricLog
    from turnwise_grpo_trainer.modes import loop_of

    found = checkpoints_of(out) if resume else []
    train = setup.train
    view = TrainView(train.num_steps, train.tasks_per_step * setup.group_size, Console(stderr=True))
    manager = setup.manager()  # what a plugin cannot do without is refused before the model is loaded
    trainer = setup.trainer()
    with manager:
        log = MetricLog(out, manager.observers.emit, setup.described())
        loop = loop_of(setup, manager, trainer, log, view)
        try:
            if not resume:
                remove_checkpoints(out)  # only now that all has been loaded
            log.start(from_step=step_of(found[-1]) if found else None)
            if found:
                go_on(loop)
            with view, interrupts(loop.interrupt):
                loop.run()
            trainer.export(out / "model")
        except TrainingInterruptedError as error:
            sys.stderr.write(f"turnwise: {error}; to go on: turnwise train CONFIG --out {out} --resume\n")
            return INTERRUPTED
        finally:
            log.close()
            trainer.close()
    finish(loop, Console())
    return OK


def finish(loop: Any, console: Any) -> None:
    """Draw the curve, write and print the tables."""
    from turnwise_grpo_trainer.learning_curve import (
        CURVE_FILE,
        REPORT_FILE,
        as_markdown,
        as_table,
        before_and_after,
        draw_curve,
    )
    from turnwise_grpo_trainer.metric_log import read_metrics
    from turnwise_grpo_trainer.stage_table import stage_rows, stages_as_markdown, stages_as_table

    out: Path = loop.out
    metrics = read_metrics(out)
    draw_curve(metrics, out / CURVE_FILE, title=f"{loop.step} steps, {loop.train_s:.0f} s")
    rows = before_and_after(loop.validations)
    stages = stage_rows(metrics)
    (out / REPORT_FILE).write_text(as_markdown(rows) + stages_as_markdown(stages), encoding="utf-8")
    if rows:
        console.print(as_table(rows))
    if stages:
        console.print(stages_as_table(stages))
    console.print(
        f"wrote {out}: model, {CURVE_FILE}, {REPORT_FILE}; {loop.step} steps took {loop.train_s:.1f} s"
        f" ({loop.train_cpu_s:.1f} s of processor time)",
        soft_wrap=True,
    )
