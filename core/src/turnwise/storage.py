"""
Finished episodes in files: Parquet or JSONL, one row per trajectory, of plain types only.

A file is written under a temporary name and renamed when it is complete. Reading restores every record exactly, and
nothing is ever pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attrs import evolve
from attrs import fields as attributes_of

from turnwise.errors import DataError
from turnwise.record import DTYPES, NO_VERSION, Origin
from turnwise.result import EpisodeResult, total_score
from turnwise.trajectory import Trajectory
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

_SEGMENT: Final = pa.struct(
    [("origin", pa.string()), *((name, pa.int32()) for name in ("start", "stop", "block", "path"))]
)
_IDS: Final = pa.list_(pa.int32())
_ARRAYS: Final[Mapping[str, pa.DataType]] = {
    "prompt_ids": _IDS,
    "response_ids": _IDS,
    "response_mask": pa.list_(pa.uint8()),
    "logprobs": pa.list_(pa.float32()),
    "weight_versions": _IDS,
    "position_ids": _IDS,
    "block_start": _IDS,
    "path_start": _IDS,
}
_COUNTS: Final = ("num_turns", "num_tool_calls", "num_tool_errors", "num_cached_tokens")
_SECONDS: Final = ("total_s", "llm_s", "tool_s", "reward_s")
_FAULT: Final = tuple(attribute.name for attribute in attributes_of(Fault))
_JSON: Final = ("messages", "ground_truth", "task_messages", "task_extra", "score_extra", "num_tokens", "metrics_extra")
_SCORES: Final[Mapping[str, type[TurnScore] | type[TokenScore]]] = {"turn": TurnScore, "token": TokenScore}
_BATCH_ROWS: Final = 256

SCHEMA: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("uid", "agent_name", "data_source", "status", "task_agent_name")),
        *((name, pa.int64()) for name in ("sample_index", "rollout_n", "global_step", "trajectory_index")),
        ("validation", pa.bool_()),
        *((f"fault_{name}", pa.string()) for name in _FAULT),
        *_ARRAYS.items(),
        ("segments", pa.list_(_SEGMENT)),
        *((name, pa.string()) for name in ("prompt_text", "response_text", "score_level", "score_at")),
        ("reward", pa.float64()),
        ("score_values", pa.list_(pa.float64())),
        *((name, pa.int64()) for name in _COUNTS),
        *((name, pa.float64()) for name in (*_SECONDS, "mask_ratio", "tool_reward")),
        *((name, pa.string()) for name in _JSON),
    ]
)
"""
Columns of `trajectories.parquet`: what describes an episode stands in each of its rows, `reward` is the row's own.

`trajectory_index` is null for an episode without a trajectory, whose other columns are kept. These columns hold JSON
text: messages, ground_truth, task_messages, task_extra, score_extra, num_tokens, metrics_extra.
"""

_Row = dict[str, Any]


class TrajectoryWriter:
    """
    Streams finished episodes to a file; as a context manager it closes also when it is left by an exception.

    The file gets its name when it is closed, and replaces one of that name; until then it ends in `.partial`. What
    JSON cannot hold, in messages and the like, is written as its text.

    Example:
        >>> with TrajectoryWriter("run/trajectories.parquet", decode=tokenizer.decode) as writer:  # doctest: +SKIP
        ...     writer.write(result)
    """

    def __init__(
        self, path: str | Path, *, decode: Callable[[TokenArray], str] | None = None, rows_per_group: int = 64
    ) -> None:
        """
        Open the file; missing directories are made.

        Args:
            path: ends in `.parquet` or `.jsonl`.
            decode: gives `prompt_text` and `response_text`, which are null without it.
            rows_per_group: how many rows are kept in memory before they are written.

        Raises:
            DataError: the suffix is another one.
        """
        self._path = Path(path)
        sink = _SINKS.get(self._path.suffix)
        if sink is None:
            raise DataError(f"{path}: suffix {self._path.suffix!r} is none of {', '.join(_SINKS)}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self._path.with_name(f"{self._path.name}.partial")
        self._decode = decode
        self._rows_per_group = rows_per_group
        self._rows: list[_Row] = []
        self._file: BinaryIO = self._partial.open("wb")
        self._sink = sink(self._file)

    def write(self, result: EpisodeResult) -> None:
        """Add an episode; `DataError` when its scores do not fit its trajectories."""
        self._rows += _rows_of(result, self._decode)
        if len(self._rows) >= self._rows_per_group:
            self.flush()

    def flush(self) -> None:
        """Hand all rows to the file."""
        rows, self._rows = self._rows, []
        if rows:
            self._sink.write(rows)
            self._file.flush()

    def close(self) -> None:
        """Complete the file and give it its name. Idempotent."""
        if self._file.closed:
            return
        with self._file:
            self.flush()
            self._sink.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        os.replace(self._partial, self._path)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


class _ParquetSink:
    """Each write is a row group."""

    def __init__(self, file: BinaryIO) -> None:
        self._writer = pq.ParquetWriter(file, SCHEMA, compression="zstd")

    def write(self, rows: Sequence[_Row]) -> None:
        texts = [row | {name: _json(row[name]) for name in _JSON} for row in rows]
        self._writer.write_table(pa.Table.from_pylist(texts, SCHEMA))

    def close(self) -> None:
        self._writer.close()


class _JsonlSink:
    """Each row is a line, in which nothing is JSON within JSON."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: Sequence[_Row]) -> None:
        self._file.writelines(_json(row).encode() + b"\n" for row in rows)

    def close(self) -> None:
        pass


_SINKS: Final[Mapping[str, type[_ParquetSink] | type[_JsonlSink]]] = {".parquet": _ParquetSink, ".jsonl": _JsonlSink}


def read_results(path: str | Path) -> list[EpisodeResult]:
    """
    Read the episodes of a file, in the order in which they were written.

    Args:
        path: the file, or a directory that holds `trajectories.parquet` or `trajectories.jsonl`.

    Returns:
        Episodes whose records equal those that were written; tuples within messages and the like come back as lists.

    Raises:
        DataError: there is no such file, or it is not one of a `TrajectoryWriter`; the text names the file and row.
    """
    file = _file_of(Path(path))
    read = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}.get(file.suffix)
    if read is None:
        raise DataError(f"{file}: suffix {file.suffix!r} is none of {', '.join(_SINKS)}")
    results: list[EpisodeResult] = []
    num_rows = 0
    try:
        for row in read(file):
            episode = _continued(results, row) if row["trajectory_index"] else _episode(row)
            results.append(_with_trajectory(episode, row))
            num_rows += 1
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError(f"{file}, row {num_rows}: cannot be read as a trajectory: {what}") from error
    return results


# Episodes to rows


def _rows_of(result: EpisodeResult, decode: Callable[[TokenArray], str] | None) -> list[_Row]:
    if result.scores and len(result.scores) != len(result.trajectories):
        counts = f"{len(result.scores)} scores for {len(result.trajectories)} trajectories"
        raise DataError(f"episode {result.uid}: {counts}")
    shared = _shared_columns(result)
    if not result.trajectories:
        return [shared]
    scores: Sequence[Score | None] = result.scores or [None] * len(result.trajectories)
    return [
        shared | {"trajectory_index": index} | _record_columns(record, decode) | _score_columns(score)
        for index, (record, score) in enumerate(zip(result.trajectories, scores, strict=True))
    ]


def _shared_columns(result: EpisodeResult) -> _Row:
    task, metrics = result.task, result.metrics
    fault = {f"fault_{name}": _text(getattr(result.fault, name)) for name in _FAULT} if result.fault else {}
    return dict.fromkeys(SCHEMA.names) | {
        "uid": _text(task.uid),
        "sample_index": task.sample_index,
        "rollout_n": result.rollout_n,
        "global_step": result.global_step,
        "validation": result.validation,
        "agent_name": _text(result.agent_name),
        "data_source": _text(task.data_source),
        "status": str(result.status),
        **fault,
        "messages": result.messages,
        "ground_truth": task.ground_truth,
        "task_messages": task.messages,
        "task_agent_name": _text(task.agent_name),
        "task_extra": task.extra,
        **{name: getattr(metrics, name) for name in (*_COUNTS, *_SECONDS, "mask_ratio", "tool_reward", "num_tokens")},
        "metrics_extra": metrics.extra,
    }


def _record_columns(record: Trajectory, decode: Callable[[TokenArray], str] | None) -> _Row:
    return {
        **{name: getattr(record, name) for name in _ARRAYS},
        "segments": [
            {"origin": s.origin.name.lower(), "start": s.start, "stop": s.stop, "block": s.block, "path": s.path}
            for s in record.segments
        ],
        "prompt_text": _text(decode(record.prompt_ids)) if decode else None,
        "response_text": _text(decode(record.response_ids)) if decode else None,
    }


def _score_columns(score: Score | None) -> _Row:
    if score is None:
        return {}
    columns: _Row = {"reward": total_score(score), "score_extra": score.extra}
    if isinstance(score, TrajectoryScore):
        return columns | {"score_level": "trajectory", "score_values": [score.value], "score_at": str(score.at)}
    level = "turn" if isinstance(score, TurnScore) else "token"
    return columns | {"score_level": level, "score_values": list(score.values)}


def _text(value: str) -> str:
    """Return a text that can be written as UTF-8: half a surrogate pair becomes its escape."""
    return value.encode("utf-8", "backslashreplace").decode()


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=_plain)
    return text if text.isascii() or _text(text) == text else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else str(value)


# Rows to episodes


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [file for suffix in _SINKS if (file := path / f"trajectories{suffix}").exists()]
    if len(found) != 1:
        names = " and ".join(f"trajectories{suffix}" for suffix in _SINKS)
        raise DataError(f"{path}: holds {'both' if found else 'neither of'} {names}")
    return found[0]


def _parquet_rows(file: Path) -> Iterator[_Row]:
    with file.open("rb") as stream:
        parquet = pq.ParquetFile(stream)
        if not parquet.schema_arrow.equals(SCHEMA):
            raise ValueError("the columns are not those of this version of turnwise")
        for batch in parquet.iter_batches(batch_size=_BATCH_ROWS):
            # Token columns stay arrays: as Python lists they would take ten times the time and memory.
            plain = batch.select([name for name in SCHEMA.names if name not in _ARRAYS]).to_pylist()
            for index, row in enumerate(plain):
                arrays = {name: batch.column(name)[index].values for name in _ARRAYS}
                texts = {name: json.loads(row[name]) for name in _JSON}
                yield row | texts | {k: v if v is None else v.to_numpy() for k, v in arrays.items()}


def _jsonl_rows(file: Path) -> Iterator[_Row]:
    with file.open("rb") as stream:
        for line in stream:
            yield json.loads(line)


def _episode(row: _Row) -> EpisodeResult:
    fault = Fault(**{name: row[f"fault_{name}"] for name in _FAULT}) if row["fault_owner"] is not None else None
    numbers = {name: row[name] for name in (*_COUNTS, *_SECONDS, "mask_ratio", "tool_reward", "num_tokens")}
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
        rollout_n=row["rollout_n"],
        global_step=row["global_step"],
        validation=row["validation"],
        agent_name=row["agent_name"],
        status=Status(row["status"]),
        fault=fault,
        messages=tuple(row["messages"]),
        metrics=EpisodeMetrics(**numbers, extra=row["metrics_extra"]),
    )


def _continued(results: list[EpisodeResult], row: _Row) -> EpisodeResult:
    """Take back the last episode, whose next trajectory this row must be."""
    index = row["trajectory_index"]
    last = [(result.task.uid, result.rollout_n, len(result.trajectories)) for result in results[-1:]]
    if last != [(row["uid"], row["rollout_n"], index)]:
        raise ValueError(f"trajectory {index} does not follow the one before it")
    return results.pop()


def _with_trajectory(result: EpisodeResult, row: _Row) -> EpisodeResult:
    if row["trajectory_index"] is None:
        return result
    scores = result.scores if row["score_level"] is None else (*result.scores, _score(row))
    return evolve(result, trajectories=(*result.trajectories, _trajectory(row)), scores=scores)


def _trajectory(row: _Row) -> Trajectory:
    prompt_ids = np.asarray(row["prompt_ids"], np.int32)
    segments = [(Origin[s["origin"].upper()], s["start"], s["stop"], s["block"], s["path"]) for s in row["segments"]]
    lengths = [stop - start for _origin, start, stop, _block, _path in segments]
    responses = {
        "token_ids": row["response_ids"],
        "logprobs": row["logprobs"],
        "origins": np.repeat([int(origin) for origin, *_rest in segments], lengths) if segments else [],
        "weight_versions": row["weight_versions"],
    }
    fills: dict[str, Any] = {"token_ids": prompt_ids, "logprobs": 0.0, "origins": 0, "weight_versions": NO_VERSION}
    columns = {
        name: np.concatenate([np.broadcast_to(fills[name], len(prompt_ids)), values]).astype(DTYPES[name])
        for name, values in responses.items()
    }
    layout = {name: row[name] for name in ("position_ids", "block_start", "path_start")}
    return Trajectory.from_dict(columns | layout | {"segments": segments, "num_prompt_tokens": len(prompt_ids)})


def _score(row: _Row) -> Score:
    values, extra = row["score_values"], row["score_extra"]
    if row["score_level"] == "trajectory":
        return TrajectoryScore(value=values[0], at=Placement(row["score_at"]), extra=extra)
    return _SCORES[row["score_level"]](values=tuple(values), extra=extra)
