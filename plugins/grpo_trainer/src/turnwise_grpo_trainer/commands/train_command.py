"""`turnwise train`: trains a model on the tasks of a config."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Resources
from turnwise.terminal import write_error
from turnwise_grpo_trainer.loop.interrupts import TrainingInterruptedError
from turnwise_result_files.folder_lock import make_folder, writing_to

OK: Final = 0
INTERRUPTED: Final = 130
_EPILOG: Final = """\
Examples:
  turnwise train examples/train_calculator.yaml --out runs/train
  turnwise train examples/train_calculator.yaml --dry-run
  turnwise train examples/train_calculator.yaml train.num_steps=5 rollout.n=4 --out runs/short
  turnwise train examples/train_calculator.yaml --out runs/train --resume

CONFIG is a run config, as for `turnwise rollout`, with a section `train`. The command writes config.yaml,
metrics.jsonl, checkpoints/, the episodes of each step in episodes/, the trained model in model/, curve.png, and
report.md with held-out results before and after training. On Ctrl-C or SIGTERM it interrupts the running episodes and
writes a checkpoint, from which --resume continues; a second signal ends the command at once. A job may always pass
--resume: without a checkpoint the training starts at step 0.
Exit codes: 0; 2 for a bad config or bad input; 130 if interrupted; 1 if it failed.
"""


class TrainCommand:
    """Trains a model on the tasks of a config."""

    help = "train a model on the tasks of a config"

    def __init__(self, config: NoConfig, resources: Resources) -> None:
        pass

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        parser.add_argument("config", help="YAML or TOML file")
        parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a value, such as train.num_steps=5")
        parser.add_argument("--out", type=Path, metavar="DIR", help="output folder; created if missing")
        parser.add_argument("--overwrite", action="store_true", help="replace the training that DIR holds")
        parser.add_argument(
            "--resume", action="store_true", help="continue from the latest checkpoint in DIR, or start"
        )
        parser.add_argument(
            "--shuffle-rewards", action="store_true", help="permute the rewards: a control that must not learn"
        )
        parser.add_argument("--dry-run", action="store_true", help="check the config, print the plan and exit")

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_grpo_trainer.processes.placement import print_plan
        from turnwise_grpo_trainer.report.run_config import CONFIG_FILE, load_saved_config
        from turnwise_grpo_trainer.train_setup import read_setup, with_model

        for package in ("torch", "transformers"):
            # Not imported yet: that takes several seconds, and a plan or a refusal needs neither.
            if find_spec(package) is None:
                raise ConfigError(f"turnwise train needs {package}: pip install 'turnwise-grpo-trainer[train]'")
        overrides = [*arguments.overrides, *(["train.shuffle_rewards=true"] if arguments.shuffle_rewards else [])]
        setup = read_setup(arguments.config, overrides, with_logging=True)
        if arguments.dry_run:
            setup = with_model(setup, weights=False)
            setup.checked_scorers()
            setup.check_replays()
            print_plan(setup)
            return OK
        if arguments.out is None:
            raise ConfigError("--out: missing; name an output folder, or add --dry-run")
        out, resume = arguments.out, arguments.resume
        try:
            with _hold(out):
                resume = prepare_out(out, overwrite=arguments.overwrite, resume=resume)
                # A training that was killed before it wrote its config has pinned no model.
                has_begun = resume and (out / CONFIG_FILE).is_file()
                setup = with_model(setup, load_saved_config(out) if has_begun else None)
                from turnwise_grpo_trainer.commands.training import run_training

                run_training(setup, out, resume=resume)
        except TrainingInterruptedError as error:
            resumption = f"turnwise train CONFIG --out {arguments.out} --resume"
            write_error(f"turnwise: {error}; to continue: {resumption}\n")
            return INTERRUPTED
        return OK


@contextmanager
def _hold(out: Path) -> Iterator[None]:
    """Make the folder and keep other trainings out; one line if it is no folder, or the disk refuses a file."""
    make_folder(out)
    with writing_to(out, f"turnwise train CONFIG --out {out} --resume continues from the latest checkpoint"):
        yield


def prepare_out(out: Path, *, overwrite: bool, resume: bool) -> bool:
    """
    Recover the checkpoints of a training from a crash, and check that its folder may be written to.

    Returns:
        Whether a training continues. A job may always ask for it: one that was killed before its first checkpoint, or
        never started, is at step 0.

    Raises:
        ConfigError: it holds another training and neither option is set, it holds a file that no training wrote and
            that this one would replace, or `resume` is set and it holds a trained model without a checkpoint.
    """
    from turnwise_grpo_trainer.loop.checkpoints import CHECKPOINTS_FOLDER, MODEL_FOLDER, CheckpointStore
    from turnwise_grpo_trainer.report.metric_log import METRICS_FILE

    store = CheckpointStore(out)
    store.recover_interrupted_save()
    held = METRICS_FILE if (out / METRICS_FILE).exists() else CHECKPOINTS_FOLDER if store.all_paths() else None
    if held is not None and not (overwrite or resume):
        raise ConfigError(f"--out {out}: holds another training ({held}); add --resume to continue it, or --overwrite")
    _refuse_foreign(out, is_training=held is not None)
    if not resume or store.latest() is not None:
        return resume
    if (out / MODEL_FOLDER).exists():
        raise ConfigError(f"--resume: {out} has a trained model, but no checkpoint; add --overwrite to train again")
    import structlog

    structlog.get_logger().info("there is no checkpoint yet: the training starts at step 0", out=str(out))
    return False


def _refuse_foreign(out: Path, *, is_training: bool) -> None:
    """Raise `ConfigError` for a file or folder that the training would replace, and that no training wrote."""
    from turnwise_grpo_trainer.loop.checkpoints import MODEL_FOLDER
    from turnwise_grpo_trainer.report.metric_log import METRICS_FILE, is_metric_log
    from turnwise_grpo_trainer.report.run_config import CONFIG_FILE

    # A training writes its metrics before the others. The folder may be that of a project, with a config and a model.
    for name in [METRICS_FILE] if is_training else [CONFIG_FILE, MODEL_FOLDER]:
        if (out / name).exists() and not (name == METRICS_FILE and is_metric_log(out / name)):
            raise ConfigError(f"--out {out}: {name} stays, because no training wrote it; choose another folder")
