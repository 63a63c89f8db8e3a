"""
Checkpoints of a training: folders that appear whole or not at all.

One holds the models (`model_state`), where the loop stands as JSON, what waits in the buffer as Parquet, and the
episodes that were cut. So what was rolled out and not learnt from is neither lost nor sampled again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from turnwise import EpisodeResult, TrajectoryWriter, load_unfinished, read_results, save_unfinished
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise_grpo_trainer.loop import TrainLoop

CHECKPOINTS_FOLDER: Final = "checkpoints"
UNFINISHED_FILE: Final = "unfinished.jsonl"
_NAME: Final = re.compile(r"step-(\d{8})")
_REPLACED: Final = ".replaced"


def checkpoints_of(out: Path) -> list[Path]:
    """Return the checkpoints of a training, oldest first."""
    folder = out / CHECKPOINTS_FOLDER
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint was written after."""
    return int(checkpoint.name.partition("-")[2])


def save(loop: TrainLoop) -> Path:
    """Write a checkpoint and remove old ones; return its folder."""
    folder = loop.out / CHECKPOINTS_FOLDER / f"step-{loop.step:08d}"
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    loop.trainer.save(partial / "trainer")
    buffer = loop.buffer.state_dict()
    for name in ("waiting", "partial"):
        _write_episodes(partial / f"{name}.parquet", buffer.pop(name))
    save_unfinished(partial / UNFINISHED_FILE, loop.unfinished)
    (partial / "loop.json").write_text(json.dumps({**loop.state_dict(), "buffer": buffer}), encoding="utf-8")
    _put_in_place(partial, folder)
    for old in checkpoints_of(loop.out)[: -loop.setup.train.checkpoint.keep_last]:
        shutil.rmtree(old)
    return folder


def _put_in_place(partial: Path, folder: Path) -> None:
    """Give a checkpoint its name; one that had it, of the same step, is there until then, if under another name."""
    replaced = folder.with_name(f"{folder.name}{_REPLACED}")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(folder, replaced)
    os.replace(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def mend(out: Path) -> None:
    """Give a checkpoint its name back that was about to be replaced when the training was killed."""
    for replaced in (out / CHECKPOINTS_FOLDER).glob(f"step-*{_REPLACED}"):
        folder = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        if folder.exists():
            shutil.rmtree(replaced)
        else:
            os.replace(replaced, folder)


def remove_checkpoints(out: Path) -> None:
    """Remove all checkpoints of a training, whole or not; what else lies beside them stays."""
    for folder in (out / CHECKPOINTS_FOLDER).glob("step-*"):
        shutil.rmtree(folder)


def resume(loop: TrainLoop) -> bool:
    """Stand where the latest checkpoint of the training's folder was written; False when it has none."""
    found = checkpoints_of(loop.out)
    if not found:
        return False
    load(loop, found[-1])
    return True


def load(loop: TrainLoop, folder: Path) -> None:
    """Stand where a checkpoint was written; `ConfigError` when it is none."""
    try:
        state: dict[str, Any] = json.loads((folder / "loop.json").read_text(encoding="utf-8"))
        waiting = {name: _read(folder, name) for name in ("waiting", "partial")}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: not a checkpoint of a training: {error}") from error
    loop.trainer.load(folder / "trainer")
    try:
        loop.buffer.load_state_dict({**state.pop("buffer"), **waiting})
        loop.load_state_dict(state)
    except KeyError as error:
        raise ConfigError(f"{folder}: not a checkpoint of a training: loop.json has no {error}") from error
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from error
    loop.go_on_with(load_unfinished(folder / UNFINISHED_FILE))


def _write_episodes(path: Path, episodes: Sequence[EpisodeResult]) -> None:
    if episodes:
        with TrajectoryWriter(path) as writer:
            for episode in episodes:
                writer.write(episode)


def _read(folder: Path, name: str) -> list[EpisodeResult]:
    path = folder / f"{name}.parquet"
    return list(read_results(path)) if path.exists() else []
