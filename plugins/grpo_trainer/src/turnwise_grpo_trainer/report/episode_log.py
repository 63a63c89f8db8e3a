"""The episodes of a training: a Parquet file for each step, with advantages, and one for each validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from turnwise import EpisodeResult
from turnwise.files import partial_path
from turnwise.types import FloatArray, TokenArray
from turnwise_grpo_trainer.report.record_values import split_by_record
from turnwise_result_files import TrajectoryWriter

if TYPE_CHECKING:
    from turnwise import RolloutBatch

EPISODES_FOLDER: Final = "episodes"
_NAME: Final = re.compile(r"(?:step|validation)-(\d{8})\.parquet(\.partial)?")
Columns = Sequence[FloatArray | None]
"""Advantages of each trajectory's response tokens; None for one that is not trained."""


@frozen
class EpisodeLog:
    """
    Writes the episodes of training steps.

    Attributes:
        out: folder of the training.
        every: steps between files; 0 writes none.
        decode: gives the texts of prompts and responses; None leaves them out.
    """

    out: Path
    every: int = 1
    decode: Callable[[TokenArray], str] | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds the files."""
        return self.out / EPISODES_FOLDER

    def start(self, *, from_step: int | None) -> None:
        """Remove the files of an earlier training (None), or of the steps after the one to resume from."""
        for file in self.folder.glob("*-*"):
            name = _NAME.fullmatch(file.name)
            if name and (from_step is None or name[2] or int(name[1]) > from_step):
                file.unlink()

    def is_due(self, step: int) -> bool:
        """Return whether the episodes of a step are written; also of the first step."""
        return self.every > 0 and (step - 1) % self.every == 0

    def write(self, step: int, episodes: Sequence[EpisodeResult], advantages: Sequence[Columns]) -> Path:
        """Write the file of a step, in the order of the batch; return it."""
        path = self.folder / f"step-{step:08d}.parquet"
        with self._writing(path, training_step=step) as writer:
            for episode, columns in zip(episodes, advantages, strict=True):
                writer.write(episode, columns)
        return path

    def write_validation(self, step: int, episodes: Sequence[EpisodeResult]) -> None:
        """Write the held-out episodes of a step, unless no files are wanted."""
        if self.every:
            with self._writing(self.folder / f"validation-{step:08d}.parquet") as writer:
                for episode in episodes:
                    writer.write(episode)

    @contextmanager
    def _writing(self, path: Path, **options: Any) -> Iterator[TrajectoryWriter]:
        """Open a file for episodes; a full disk leaves no half file, because a resumed training writes it again."""
        self.folder.mkdir(exist_ok=True)  # not with its parents, see `atomic_folder`
        try:
            with TrajectoryWriter(path, decode=self.decode, **options) as writer:
                yield writer
        except BaseException:
            partial_path(path).unlink(missing_ok=True)
            raise


def split_advantages(
    episodes: Sequence[EpisodeResult],
    advantages: NDArray[Any],
    collate: Callable[[Sequence[EpisodeResult]], RolloutBatch],
) -> list[Columns]:
    """
    Return the advantages of each episode by trajectory.

    Args:
        episodes: of the batch, in order.
        advantages: (B, R), of the batch's rows.
        collate: makes a batch of episodes, as the trainer's batch was made.

    Returns:
        For each episode, (R,) float32 of each trajectory, 0 outside the loss; None for one that is not trained.
    """
    return split_by_record(episodes, advantages.astype(np.float32, copy=False), collate)
