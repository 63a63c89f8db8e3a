"""
Files of finished episodes: Parquet or JSONL, one row per trajectory, plain types only.

Reading restores every record exactly, and nothing is pickled. `turnwise_result_files.row_file` is the file format.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import pyarrow as pa
import structlog
from attrs import asdict, evolve
from numpy.typing import ArrayLike

from turnwise.errors import DataError, describe, first_line
from turnwise.record.columns import DTYPES, NO_VERSION, Origin
from turnwise.record.lineage import RecordLineage
from turnwise.record.result import EpisodeResult, total_score
from turnwise.record.trajectory import Trajectory
from turnwise.types import (
    EpisodeMetrics,
    Fault,
    Placement,
    Score,
    Status,
    Task,
    TokenArray,
    TokenScore,
    TrajectoryScore,
    TurnScore,
)
from turnwise_result_files.row_file import (
    ARRAYS,
    COUNTS,
    FAULT,
    SCHEMA,
    SECONDS,
    SUFFIXES,
    Row,
    RowFile,
    find_rows,
    plain_text,
    read_rows,
)

_SCORES: Final[Mapping[str, type[TurnScore] | type[TokenScore]]] = {"turn": TurnScore, "token": TokenScore}
_REQUEST: Final = ("rollout_n", "global_step", "validation")
_FLUSH_S: Final = 1.0


class TrajectoryWriter:
    """
    Streams finished episodes to a file; as a context manager it closes also when it is left by an exception.

    The file gets its name when it is closed, and replaces a file of that name; until then its name ends in `.partial`.
    An episode can be read there a second after it was written, also when this process is killed. Values in messages
    and the like that are no JSON values are written as their text.

    Example:
        >>> with TrajectoryWriter("run/trajectories.parquet", decode=tokenizer.decode) as writer:  # doctest: +SKIP
        ...     writer.write(result)
    """

    def __init__(
        self, path: str | Path, *, decode: Callable[[TokenArray], str] | None = None, rows_per_group: int = 64
    ) -> None:
        """
        Prepare to write; the first rows create the file and missing directories.

        Args:
            path: ends in `.parquet` or `.jsonl`.
            decode: gives `prompt_text` and `response_text`, which are null without it.
            rows_per_group: most episodes kept in memory, for a second at most.

        Raises:
            DataError: the suffix is unknown.
        """
        self._path = Path(path)
        kind = SUFFIXES.get(self._path.suffix)
        if kind is None:
            raise DataError(f"{path}: suffix {self._path.suffix!r} is none of {', '.join(SUFFIXES)}")
        self._kind: type[RowFile] = kind
        self._decode = decode
        self._rows_per_group = rows_per_group
        self._pieces: list[pa.Table | bytes] = []
        self._file: RowFile | None = None
        self._closed = False
        self._error: OSError | None = None
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def write(self, result: EpisodeResult) -> EpisodeResult:
        """
        Add an episode.

        Returns:
            The episode as it was written: one with values that have no place in the file has failed.

        Raises:
            OSError: the disk is full or cannot be written; all episodes that were flushed before can be read.
        """
        try:
            piece = self._kind.encode(_rows_of(result, self._decode))
        except Exception as error:  # noqa: BLE001 - plugins may return anything; other episodes must not pay for it
            structlog.get_logger().error("episode cannot be written", episode=result.uid, reason=describe(error))
            result = _without_odd_values(result, error)
            piece = self._kind.encode(_rows_of(result, self._decode))
        with self._lock:
            self._pieces.append(piece)
            if len(self._pieces) >= self._rows_per_group:
                self.flush()
            elif self._timer is None:
                # The next episode may be minutes away, so a timer writes the last ones.
                self._timer = threading.Timer(_FLUSH_S, self._flush_later)
                self._timer.daemon = True
                self._timer.start()
        return result

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
                self._pieces = []

    def _flush_later(self) -> None:
        with suppress(OSError):  # the next call of `flush` raises it again
            self.flush()

    def _open(self) -> RowFile:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._kind(self._path)
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
    results: list[EpisodeResult] = []
    num_rows = 0
    try:
        for row in read_rows(file):
            episode = _continued(results, row) if row["trajectory_index"] else _episode(row)
            results.append(_with_trajectory(episode, row))
            num_rows += 1
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError(f"{file}, row {num_rows}: cannot be read as a trajectory: {reason}") from error
    return results


# Episodes to rows


def _without_odd_values(result: EpisodeResult, error: Exception) -> EpisodeResult:
    """Return an episode with the values that every file takes, failed by the owner of the others."""
    owner = result.fault.owner if result.fault else "reward" if result.scores else "agent"
    index = result.task.sample_index
    fits = isinstance(index, int) and 0 <= index < 2**63
    task = evolve(result.task, sample_index=index if fits else -1)
    return evolve(
        result,
        task=task,
        status=Status.FAILED,
        fault=Fault(owner=owner, kind=type(error).__name__, message=f"cannot be written: {first_line(error)}"),
        scores=(),
        metrics=EpisodeMetrics(),
    )


def _rows_of(result: EpisodeResult, decode: Callable[[TokenArray], str] | None) -> list[Row]:
    if result.scores and len(result.scores) != len(result.trajectories):
        counts = f"{len(result.scores)} scores for {len(result.trajectories)} trajectories"
        raise DataError(f"episode {result.uid}: {counts}")
    shared = _shared_columns(result)
    if not result.trajectories:
        return [shared]
    scores: Sequence[Score | None] = result.scores or [None] * len(result.trajectories)
    lineage: Sequence[RecordLineage | None] = result.lineage or [None] * len(result.trajectories)
    return [
        shared | {"trajectory_index": index} | _record_columns(record, line, decode) | _score_columns(score)
        for index, (record, line, score) in enumerate(zip(result.trajectories, lineage, scores, strict=True))
    ]


def _shared_columns(result: EpisodeResult) -> Row:
    task, metrics = result.task, result.metrics
    fault = {f"fault_{name}": plain_text(getattr(result.fault, name)) for name in FAULT} if result.fault else {}
    return dict.fromkeys(SCHEMA.names) | {
        "uid": plain_text(task.uid),
        "sample_index": task.sample_index,
        **{name: getattr(result, name) for name in _REQUEST},
        "objective": str(result.objective),
        "agent_name": plain_text(result.agent_name),
        "data_source": plain_text(task.data_source),
        "status": str(result.status),
        **fault,
        "messages": result.messages,
        "ground_truth": task.ground_truth,
        "task_messages": task.messages,
        "task_agent_name": plain_text(task.agent_name),
        "task_extra": task.extra,
        **{name: getattr(metrics, name) for name in (*COUNTS, *SECONDS, "mask_ratio", "tool_reward", "num_tokens")},
        "metrics_extra": metrics.extra,
    }


def _record_columns(record: Trajectory, line: RecordLineage | None, decode: Callable[[TokenArray], str] | None) -> Row:
    texts = {name: plain_text(getattr(line, name)) for name in ("kind", "label")} if line else {}
    return {
        "lineage": line and asdict(line) | texts,
        **{name: getattr(record, name) for name in ARRAYS},
        "segments": [
            {"origin": s.origin.name.lower(), "start": s.start, "stop": s.stop, "block": s.block, "path": s.path}
            for s in record.segments
        ],
        "prompt_text": plain_text(decode(record.prompt_ids)) if decode else None,
        "response_text": plain_text(decode(record.response_ids)) if decode else None,
    }


def _score_columns(score: Score | None) -> Row:
    if score is None:
        return {}
    columns: Row = {"reward": total_score(score), "score_extra": score.extra}
    if isinstance(score, TrajectoryScore):
        return columns | {"score_level": "trajectory", "score_values": [score.value], "score_at": str(score.at)}
    level = "turn" if isinstance(score, TurnScore) else "token"
    return columns | {"score_level": level, "score_values": list(score.values)}


# Rows to episodes


def _episode(row: Row) -> EpisodeResult:
    fault = Fault(**{name: row[f"fault_{name}"] for name in FAULT}) if row["fault_owner"] is not None else None
    numbers = {name: row[name] for name in (*COUNTS, *SECONDS, "mask_ratio", "tool_reward", "num_tokens")}
    return EpisodeResult(
        task=Task(
            messages=tuple(row["task_messages"]),
            uid=row["uid"],
            sample_index=row["sample_index"],
            agent_name=row["task_agent_name"],
            ground_truth=row["ground_truth"],
            data_source=row["data_source"],
            extra=row["task_extra"],
        ),
        **{name: row[name] for name in _REQUEST},
        agent_name=row["agent_name"],
        objective=row["objective"],
        status=Status(row["status"]),
        fault=fault,
        messages=tuple(row["messages"]),
        metrics=EpisodeMetrics(**numbers, extra=row["metrics_extra"]),
    )


def _continued(results: list[EpisodeResult], row: Row) -> EpisodeResult:
    """Take back the last episode, whose next trajectory this row must be."""
    index = row["trajectory_index"]
    last = [(result.task.uid, result.rollout_n, len(result.trajectories)) for result in results[-1:]]
    if last != [(row["uid"], row["rollout_n"], index)]:
        raise ValueError(f"trajectory {index} does not follow the one before it")
    return results.pop()


def _with_trajectory(result: EpisodeResult, row: Row) -> EpisodeResult:
    if row["trajectory_index"] is None:
        return result
    scores = result.scores if row["score_level"] is None else (*result.scores, _score(row))
    lineage = result.lineage if row["lineage"] is None else (*result.lineage, RecordLineage(**row["lineage"]))
    return evolve(result, trajectories=(*result.trajectories, _trajectory(row)), scores=scores, lineage=lineage)


def _trajectory(row: Row) -> Trajectory:
    prompt_ids = np.asarray(row["prompt_ids"], np.int32)
    segments = [(Origin[s["origin"].upper()], s["start"], s["stop"], s["block"], s["path"]) for s in row["segments"]]
    lengths = [stop - start for _origin, start, stop, _block, _path in segments]
    responses = {
        "token_ids": row["response_ids"],
        "logprobs": row["logprobs"],
        "origins": np.repeat([int(origin) for origin, *_rest in segments], lengths) if segments else [],
        "weight_versions": row["weight_versions"],
    }
    fills: Mapping[str, ArrayLike] = {
        "token_ids": prompt_ids,
        "logprobs": 0.0,
        "origins": 0,
        "weight_versions": NO_VERSION,
    }
    columns = {
        name: np.concatenate([np.broadcast_to(fills[name], len(prompt_ids)), values]).astype(DTYPES[name])
        for name, values in responses.items()
    }
    layout = {name: row[name] for name in ("position_ids", "block_start", "path_start")}
    return Trajectory.from_dict(columns | layout | {"segments": segments, "num_prompt_tokens": len(prompt_ids)})


def _score(row: Row) -> Score:
    values, extra = row["score_values"], row["score_extra"]
    if row["score_level"] == "trajectory":
        return TrajectoryScore(value=values[0], at=Placement(row["score_at"]), extra=extra)
    return _SCORES[row["score_level"]](values=tuple(values), extra=extra)
