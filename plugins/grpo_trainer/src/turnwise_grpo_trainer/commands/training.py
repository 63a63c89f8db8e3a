"""Runs a training from start to end: builds its parts, trains, and writes the results."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from turnwise import RolloutManager
from turnwise.console import Console
from turnwise.files import atomic_folder, write_text
from turnwise_engine_support.devices import check_device
from turnwise_grpo_trainer.build import build_loop, build_trainer
from turnwise_grpo_trainer.loop.checkpoints import (
    MODEL_FOLDER,
    MODELS_FOLDER,
    CheckpointStore,
    check_checkpoint,
    parse_step,
    replace_folder,
)
from turnwise_grpo_trainer.loop.interrupts import handle_signals
from turnwise_grpo_trainer.loop.loop import TrainLoop
from turnwise_grpo_trainer.processes.placement import borrows_devices, place_training
from turnwise_grpo_trainer.report.learning_curve import as_markdown, as_table, compare_validations, draw_curve
from turnwise_grpo_trainer.report.live_view import TrainView
from turnwise_grpo_trainer.report.metric_log import MetricLog, read_metrics
from turnwise_grpo_trainer.report.model_card import write_card
from turnwise_grpo_trainer.report.run_config import save_config
from turnwise_grpo_trainer.report.stage_meter import StageMeter
from turnwise_grpo_trainer.report.stage_table import stage_rows, stages_as_markdown, stages_as_table
from turnwise_grpo_trainer.train_setup import TrainSetup
from turnwise_result_files import RunningEpisodes

CURVE_FILE: Final = "curve.png"
REPORT_FILE: Final = "report.md"
_NO_REPORT: Final = "Nothing to compare: the training has no held-out tasks (`data.validation_path`).\n"


def run_training(setup: TrainSetup, out: Path, *, resume: bool) -> None:
    """
    Train, and write checkpoints, metrics and results to a folder.

    Args:
        setup: the inputs of the training.
        out: folder of the training; it exists.
        resume: continue from the latest checkpoint; otherwise existing checkpoints are removed.

    Raises:
        ConfigError: a file of the checkpoint was changed after it was written.
        TrainingInterruptedError: Ctrl-C or SIGTERM; a checkpoint was written.
    """
    store = CheckpointStore(out, setup.train.checkpoint.keep_last)
    latest = store.latest() if resume else None
    if latest is not None:
        check_checkpoint(latest)
    if setup.train.sharding.num_processes == 1:  # this process trains, and its engine would load weights first
        check_device(setup.train.policy.device, "train.policy.device")
    view = TrainView(setup.train.num_steps, setup.train.tasks_per_step * setup.group_size, Console(stderr=True))
    place_training(setup)  # refuses devices that engine and trainer cannot share
    scorers = setup.checked_scorers()
    setup.check_replays()
    # The manager comes first: it reports a plugin's missing requirements before the model is loaded.
    manager = RolloutManager.from_config(setup.run, setup.host, observers=[view, RunningEpisodes(out)])
    _check_run(setup, manager, is_new=latest is None)
    with ExitStack() as stack:
        if borrows_devices(setup):
            # The replicas come first, because they reserve the devices. They sleep while the models are loaded there.
            stack.enter_context(manager)
            manager.sleep()
        trainer = build_trainer(setup, manager)
        stack.enter_context(manager)
        setup.check_replays(manager.capabilities)
        log = MetricLog(out, manager.observers.emit, setup.describe())
        for scorer in scorers:
            scorer.start(setup.scoring)
        loop = build_loop(setup, manager, trainer, log, view, scorers)
        try:
            if not resume:
                store.remove_all()  # not earlier: if loading fails, the old training is still complete
            if latest is not None:
                store.load(loop, latest)  # not later: a refused resume leaves the files as they were
            from_step = None if latest is None else parse_step(latest)
            log.start(from_step=from_step)  # the first file, by which `prepare_out` tells a training from other folders
            save_config(setup.run, out)
            loop.episodes.start(from_step=from_step)
            with view, handle_signals(loop.interrupt):
                loop.run()
            export_model(loop, out)
        finally:
            trainer.close()
    write_results(loop, out, Console())


def _check_run(setup: TrainSetup, manager: RolloutManager, *, is_new: bool) -> None:
    """Raise `ConfigError` for what the parts of the run exclude, before anything is loaded."""
    if setup.run.runtime.name == "local":  # a runtime of other processes knows its engine once it has started
        setup.check_replays(manager.capabilities)
    if is_new:  # a resumed training measured them at its start
        manager.check_prompts(setup.tasks)
        held_out = setup.validation_tasks[: setup.train.validation.limit]
        manager.check_prompts(held_out, key="data.validation_path")


def export_model(loop: TrainLoop, out: Path) -> None:
    """Write the policy of the last step, or of the best one, and its model card; log what that costs."""
    meter = StageMeter()
    with meter.stage("export"):
        _export_model(loop, out)
    loop.log_end(meter.metrics())


def _export_model(loop: TrainLoop, out: Path) -> None:
    step = loop.step
    if loop.setup.train.checkpoint.export == "best":
        best = loop.store.best()
        check_checkpoint(best)
        loop.trainer.load(best / MODELS_FOLDER)
        step = parse_step(best)
    # A reader of the folder finds the whole model or none.
    with atomic_folder(out / MODEL_FOLDER, replace_folder) as partial:
        loop.trainer.export(partial)
        write_card(partial, loop.setup.run, loop.validations, step, name=out.name)


def write_results(loop: TrainLoop, out: Path, console: Console) -> None:
    """Draw the learning curve, and write and print the tables."""
    metrics = read_metrics(out)
    draw_curve(metrics, out / CURVE_FILE, title=f"{loop.step} steps, {loop.train_s:.0f} s")
    rows = compare_validations(loop.validations, loop.best_step)
    stages = stage_rows(metrics)
    write_text(out / REPORT_FILE, as_markdown(rows) + stages_as_markdown(stages) or _NO_REPORT)
    if rows:
        console.print(as_table(rows))
    if stages:
        console.print(stages_as_table(stages))
    if loop.stopped_early:
        patience = loop.setup.train.validation.patience
        console.print(
            f"stopped after step {loop.step}: {patience} validations without a score above step {loop.best_step}"
        )
    console.print(
        f"wrote {out}: {MODEL_FOLDER}, {CURVE_FILE}, {REPORT_FILE}; {loop.step} steps took {loop.train_s:.1f} s"
        f" ({loop.train_cpu_s:.1f} s of processor time)",
        soft_wrap=True,
    )
