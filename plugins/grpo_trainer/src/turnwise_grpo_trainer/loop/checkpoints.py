"""
Checkpoints of a training: folders that appear complete or not at all.

A checkpoint holds the models (`model_state`), the progress of the training as JSON, the episodes in the buffer as
Parquet, the interrupted episodes, and the checksums of these files. So episodes that were not trained on yet are
neither lost nor sampled again.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import structlog
from attrs import frozen

from turnwise import EpisodeResult, UnfinishedEpisode
from turnwise.errors import ConfigError
from turnwise.files import PARTIAL, atomic_folder, replace
from turnwise_grpo_trainer.loop.checksums import CHECKSUMS_FILE, check_files, write_checksums
from turnwise_result_files import TrajectoryWriter, load_unfinished, read_results, save_unfinished

CHECKPOINTS_FOLDER: Final = "checkpoints"
PROGRESS_FILE: Final = "loop.json"
UNFINISHED_FILE: Final = "unfinished.jsonl"
MODELS_FOLDER: Final = "trainer"
MODEL_FOLDER: Final = "model"
"""The trained model, in the folder of the training."""
_NAME: Final = re.compile(r"step-(\d{8})")
_REPLACED: Final = ".replaced"
_REMOVED: Final = ".removed"
_ANY_NAME: Final = re.compile(rf"{_NAME.pattern}({PARTIAL}|{_REPLACED}|{_REMOVED})?")


@frozen(kw_only=True, eq=False)
class TrainingState:
    """
    The contents of a checkpoint besides the models.

    Attributes:
        progress: JSON values.
        waiting: episodes of whole groups that wait for training.
        partial: finished episodes of incomplete groups.
        unfinished: interrupted episodes.
    """

    progress: dict[str, Any]
    waiting: Sequence[EpisodeResult] = ()
    partial: Sequence[EpisodeResult] = ()
    unfinished: Sequence[UnfinishedEpisode] = ()


class Checkpointable(Protocol):
    """A training, as `CheckpointStore` sees it."""

    @property
    def step(self) -> int:
        """Number of completed steps."""

    @property
    def kept_step(self) -> int | None:
        """Step whose checkpoint is kept however old it is; None for no such step."""

    def save_models(self, folder: Path) -> None:
        """Write the models."""

    def load_models(self, folder: Path) -> None:
        """Restore the models."""

    def state_dict(self) -> TrainingState:
        """Return the rest of the state."""

    def load_state_dict(self, state: TrainingState) -> None:
        """Restore the rest of the state; `KeyError` or `ValueError` if it does not fit. The models are restored."""


def parse_step(checkpoint: Path) -> int:
    """Return the step of a checkpoint from its folder's name."""
    return int(checkpoint.name.partition("-")[2])


@frozen
class CheckpointStore:
    """
    The checkpoints of one training.

    Attributes:
        out: folder of the training.
        keep_last: how many checkpoints to keep.
    """

    out: Path
    keep_last: int = 1

    @property
    def folder(self) -> Path:
        """The folder that holds the checkpoints."""
        return self.out / CHECKPOINTS_FOLDER

    def paths(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name))

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, if there is one."""
        return next(reversed(self.paths()), None)

    def best(self) -> Path:
        """
        Return the checkpoint with the best held-out score.

        Raises:
            ConfigError: there is none: the training kept no best checkpoint, or the initial model is still the best.
        """
        latest = self.latest()
        if latest is None:
            raise ConfigError(f"{self.out}: has no checkpoint")
        step = read_progress(latest)["kept_step"]
        if step is None:
            reason = "the training had no held-out score to choose it by, or train.checkpoint.keep_best was false"
            raise ConfigError(f"{self.out}: has no best checkpoint: {reason}")
        folder = self.folder_of(step)
        if not folder.is_dir():
            reason = "the initial model has the best held-out score" if step == 0 else f"{folder} is missing"
            raise ConfigError(f"{self.out}: has no best checkpoint: {reason}")
        return folder

    def folder_of(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which may not exist."""
        return self.folder / f"step-{step:08d}"

    def save(self, training: Checkpointable) -> Path:
        """Write a checkpoint, then remove old ones; return its folder."""
        folder = self.folder_of(training.step)
        self.folder.mkdir(exist_ok=True)  # not with its parents, see `atomic_folder`
        with atomic_folder(folder, replace_folder) as partial:
            training.save_models(partial / MODELS_FOLDER)
            state = training.state_dict()
            progress = state.progress | {"kept_step": training.kept_step, "has_checksums": True}
            _write_episodes(partial / "waiting.parquet", state.waiting)
            _write_episodes(partial / "partial.parquet", state.partial)
            save_unfinished(partial / UNFINISHED_FILE, state.unfinished)
            (partial / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")
            write_checksums(partial)
        for old in self.paths()[: -self.keep_last]:
            if parse_step(old) != training.kept_step:
                _remove_folder(old)
        return folder

    def load(self, training: Checkpointable, folder: Path) -> None:
        """
        Restore a checkpoint, whose files `check_checkpoint` has compared with their checksums.

        Raises:
            ConfigError: the folder is no checkpoint, or does not fit the training.
        """
        try:
            state = TrainingState(
                progress=read_progress(folder),
                waiting=_read_episodes(folder / "waiting.parquet"),
                partial=_read_episodes(folder / "partial.parquet"),
                unfinished=load_unfinished(folder / UNFINISHED_FILE),
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: not a checkpoint of a training: {error}") from error
        training.load_models(folder / MODELS_FOLDER)
        try:
            training.load_state_dict(state)
        except KeyError as error:
            raise ConfigError(
                f"{folder}: not a checkpoint of a training: {PROGRESS_FILE} has no key {error}"
            ) from error
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"{folder}: {error}") from error

    def recover_interrupted_save(self) -> None:
        """Finish or roll back the replacement or removal of a checkpoint that a crash interrupted."""
        for removed in self.folder.glob(f"step-*{_REMOVED}"):
            shutil.rmtree(removed, ignore_errors=True)
        for replaced in self.folder.glob(f"step-*{_REPLACED}"):
            folder = replaced.with_name(replaced.name.removesuffix(_REPLACED))
            if folder.exists():
                shutil.rmtree(replaced)
            else:
                os.replace(replaced, folder)

    def remove_all(self) -> None:
        """Remove all checkpoints, complete or not; other files in the folder stay."""
        for folder in self.all_paths():
            shutil.rmtree(folder)

    def all_paths(self) -> list[Path]:
        """Return the folders of checkpoints, complete or not, in any order."""
        return [each for each in self.folder.glob("step-*") if _ANY_NAME.fullmatch(each.name) and _is_own_folder(each)]


def check_checkpoint(folder: Path) -> None:
    """
    Compare all files of a checkpoint with their checksums, before any is loaded; log that an old one has none.

    Raises:
        ConfigError: a file was changed, added or removed, or the folder is no checkpoint.
    """
    if check_files(folder):
        return
    if read_progress(folder).get("has_checksums"):
        raise ConfigError(f"{folder}: {CHECKSUMS_FILE} is missing, so that a changed file would not be noticed")
    structlog.get_logger().warning("an old checkpoint without checksums: changed files go unnoticed", path=str(folder))


def read_progress(folder: Path) -> dict[str, Any]:
    """
    Return the JSON values of a checkpoint's `loop.json`.

    Raises:
        ConfigError: they are none of a training, or were changed after the checkpoint was written.
    """
    check_files(folder, only=PROGRESS_FILE)
    try:
        progress: object = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
        if not isinstance(progress, dict):
            raise ValueError("expected an object")  # noqa: TRY004, TRY301 - of a file, not of an argument
        for name, (expected, fits) in _PROGRESS.items():
            if name in progress and not fits(progress[name]):  # a missing one is reported where it is needed
                raise ValueError(f"{name} is {progress[name]!r:.40}, expected {expected}")  # noqa: TRY301 - the same
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}: not a checkpoint of a training: {PROGRESS_FILE}: {error}") from error
    return progress


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= cast("float", value) < math.inf


def _is_validations(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and len(each) == 2 and _is_count(each[0]) and isinstance(each[1], dict) for each in value
    )


_PROGRESS: Final[Mapping[str, tuple[str, Callable[[object], bool]]]] = {
    "step": ("a whole number from 0", _is_count),
    "version": ("a whole number from 0", _is_count),
    "has_checksums": ("true", lambda value: value is True),
    "kept_step": ("a whole number from 0, or null", lambda value: value is None or _is_count(value)),
    "train_s": ("seconds", _is_seconds),
    "train_cpu_s": ("seconds", _is_seconds),
    "validations": ("pairs of a step and its metrics", _is_validations),
    **{name: ("an object", lambda value: isinstance(value, dict)) for name in ("buffer", "health", "source")},
}
"""Values of `loop.json` by key."""


def replace_folder(partial: Path, folder: Path) -> None:
    """Give a complete folder its name; an older one of that name is moved aside, and then removed."""
    replaced = folder.with_name(f"{folder.name}{_REPLACED}")
    if folder.exists():
        # A folder cannot be renamed over another. After a crash between the two renames, `recover_interrupted_save`
        # moves the old one back.
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(folder, replaced)
    replace(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove_folder(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so a crash leaves no incomplete checkpoint under a valid name."""
    removed = folder.with_name(f"{folder.name}{_REMOVED}")
    shutil.rmtree(removed, ignore_errors=True)
    os.replace(folder, removed)
    shutil.rmtree(removed)


def _write_episodes(path: Path, episodes: Sequence[EpisodeResult]) -> None:
    if episodes:
        with TrajectoryWriter(path) as writer:
            for episode in episodes:
                writer.write(episode)


def _read_episodes(path: Path) -> list[EpisodeResult]:
    return list(read_results(path)) if path.exists() else []
