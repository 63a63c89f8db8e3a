"""
Files of finished episodes: Parquet or JSONL, one row per trajectory, plain types only.

Reading restores every record exactly, and nothing is pickled. `turnwise_result_files.row_file` is the file format.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import pyarrow as pa
import structlog
from attrs import frozen

from turnwise.errors import DataError, TurnwiseError, describe
from turnwise.record.result import EpisodeResult
from turnwise.types import FloatArray, TokenArray
from turnwise_result_files.episode_rows import (
    add_trajectory,
    read_episode,
    rows_of,
    take_continued,
    without_odd_values,
)
from turnwise_result_files.media import MediaFolder
from turnwise_result_files.row_file import SUFFIXES, RowFile, find_rows, read_rows
from turnwise_result_files.row_schema import SCHEMA, TRAINING_SCHEMA, Row

_FLUSH_S: Final = 1.0
_FLUSH_BYTES: Final = 64 * 2**20
"""Episodes of so many bytes are written at once: those with columns are large, and memory holds them until then."""
UNREADABLE: Final = (
    *(pa.ArrowException, OSError, ValueError, TypeError),
    *(AttributeError, LookupError, OverflowError, RecursionError, TurnwiseError),
)
"""Errors that a damaged row can cause."""
Advantages = Sequence[FloatArray | None]
"""Values of each trajectory's response tokens; None for one that is not trained."""


@frozen(eq=False)
class TrainedEpisode:
    """
    An episode in a file of a training step.

    Attributes:
        result: the episode.
        step: that trained on it; None in the file of a rollout.
        advantages: of each trajectory: (R,) float32, 0 outside the loss, or None where it was not trained.
    """

    result: EpisodeResult
    step: int | None
    advantages: tuple[FloatArray | None, ...]


class TrajectoryWriter:
    """
    Streams finished episodes to a file; as a context manager it closes also when it is left by an exception, unless no
    episode was written: then it makes no file, and one that is there stays.

    The file gets its name when it is closed, and replaces a file of that name; until then its name ends in `.partial`.
    An episode can be read there a second after it was written, also when this process is killed. Values in messages
    and the like that are no JSON values are written as their text. Pictures go to the folder `media` beside it, each
    once, and the file refers to them.

    Example:
        >>> with TrajectoryWriter("run/trajectories.parquet", decode=tokenizer.decode) as writer:  # doctest: +SKIP
        ...     writer.write(result)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        decode: Callable[[TokenArray], str] | None = None,
        training_step: int | None = None,
        rows_per_group: int = 64,
    ) -> None:
        """
        Prepare to write and make missing directories; the first rows create the file.

        Args:
            path: ends in `.parquet` or `.jsonl`.
            decode: gives `prompt_text` and `response_text`, which are null without it.
            training_step: the step that trains on the episodes; the file then has the columns of `TRAINING_SCHEMA`.
            rows_per_group: most episodes kept in memory, for a second at most; large ones are written sooner.

        Raises:
            DataError: the suffix is unknown.
        """
        self._path = Path(path)
        kind = SUFFIXES.get(self._path.suffix)
        if kind is None:
            raise DataError(f"{path}: suffix {self._path.suffix!r} is none of {', '.join(SUFFIXES)}")
        # Not at the first row: a folder that was removed meanwhile would come back with some rows and nothing else.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._kind: type[RowFile] = kind
        self._decode = decode
        self._media = MediaFolder(self._path.parent)
        self._training_step = training_step
        self._schema = SCHEMA if training_step is None else TRAINING_SCHEMA
        self._rows_per_group = rows_per_group
        self._pieces: list[pa.Table | bytes] = []
        self._num_bytes = 0
        self._file: RowFile | None = None
        self._closed = False
        self._error: OSError | None = None
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def write(self, result: EpisodeResult, advantages: Advantages | None = None) -> EpisodeResult:
        """
        Add an episode.

        Args:
            result: the episode.
            advantages: of each trajectory, for a file of a training step: one value for each response token, or None.

        Returns:
            The episode as it was written: one with values that have no place in the file has failed.

        Raises:
            OSError: the disk is full or cannot be written; all episodes that were flushed before can be read.
        """
        try:
            piece = self._encode(result, advantages)
        except OSError:  # the disk takes no picture
            raise
        except Exception as error:  # noqa: BLE001 - plugins may return anything; other episodes must not pay for it
            structlog.get_logger().error("episode cannot be written", episode=result.uid, reason=describe(error))
            result = without_odd_values(result, error)
            piece = self._encode(result, advantages)
        with self._lock:
            self._pieces.append(piece)
            self._num_bytes += piece.nbytes if isinstance(piece, pa.Table) else len(piece)
            if len(self._pieces) >= self._rows_per_group or self._num_bytes >= _FLUSH_BYTES:
                self.flush()
            elif self._timer is None:
                # The next episode may be minutes away, so a timer writes the last ones.
                self._timer = threading.Timer(_FLUSH_S, self._flush_later)
                self._timer.daemon = True
                self._timer.start()
        return result

    def _encode(self, result: EpisodeResult, advantages: Advantages | None) -> pa.Table | bytes:
        rows = rows_of(result, self._decode, self._media)
        if self._training_step is not None:
            columns: Advantages = advantages or [None] * len(rows)
            shared = {"training_step": self._training_step}
            rows = [row | shared | {"advantages": each} for row, each in zip(rows, columns, strict=True)]
        return self._kind.encode(rows, self._schema)

    def flush(self) -> None:
        """Hand all rows to the file, where they are safe if this process is killed."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._error is not None:
                raise self._error
            if self._pieces:
                try:
                    self._open().write(self._pieces)
                except OSError as error:
                    self._error = error  # the file may end in half a piece, behind which nothing could be read
                    raise
                self._pieces, self._num_bytes = [], 0

    def _flush_later(self) -> None:
        with suppress(OSError):  # the next call of `flush` raises it again
            self.flush()

    def _open(self) -> RowFile:
        if self._file is None:
            self._file = self._kind(self._path, self._schema)
        return self._file

    def close(self) -> None:
        """Complete the file and give it its name. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.flush()
                self._open().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        with self._lock:
            if error is not None and self._file is None and not self._pieces:
                self._closed = True
        try:
            self.close()
        except OSError:
            if error is None:  # else the error that ends the block is the one to report
                raise


def read_results(path: str | Path) -> list[EpisodeResult]:
    """
    Read the episodes of a file, in the order in which they were written.

    Args:
        path: the file, or a directory that holds `trajectories.parquet` or `trajectories.jsonl`, or one of these that
            ends in `.partial` because its writer was killed.

    Returns:
        Episodes with records equal to the written ones; tuples within messages and the like become lists.

    Raises:
        DataError: there is no such file, or it is not one of a `TrajectoryWriter`; the text names the file and row.
    """
    file = Path(path)
    if file.is_dir():
        file = find_rows(file, "trajectories")
    return [trained.result for trained in _read(file)]


def read_training_step(path: str | Path) -> list[TrainedEpisode]:
    """
    Read the episodes of a training step, in the order of the batch.

    Args:
        path: a file that a training wrote.

    Raises:
        DataError: as `read_results`; or it is the file of a rollout, which has no training step.
    """
    return [_check_trained(each, Path(path)) for each in _read(Path(path))]


def _check_trained(episode: TrainedEpisode, file: Path) -> TrainedEpisode:
    if episode.step is None:
        raise DataError(f"{file}: the file of a rollout, not of a training step")
    return episode


def _read(file: Path) -> list[TrainedEpisode]:
    results: list[EpisodeResult] = []
    advantages: list[list[FloatArray | None]] = []
    step: int | None = None
    num_rows = 0
    media = MediaFolder(file.parent)
    rows = _open_rows(file)
    try:
        for row in rows:
            if row["trajectory_index"]:
                episode = take_continued(results, row)
            else:
                episode = read_episode(row, media)
                advantages.append([])
            results.append(add_trajectory(episode, row, media))
            step = row.get("training_step")
            if row["trajectory_index"] is not None:
                values = row.get("advantages")
                advantages[-1].append(None if values is None else np.asarray(values, np.float32))
            num_rows += 1
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError(f"{file}, row {num_rows}: cannot be read as a trajectory: {reason}") from error
    return [TrainedEpisode(each, step, tuple(own)) for each, own in zip(results, advantages, strict=True)]


def _open_rows(file: Path) -> Iterator[Row]:
    """Return the rows; `DataError` if the file cannot have any."""
    try:
        if not file.exists():
            raise DataError(f"{file}: no such file")
        return read_rows(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
