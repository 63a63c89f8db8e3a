"""Converts episodes to rows of plain types, and rows to episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
from attrs import asdict, evolve
from numpy.typing import ArrayLike

from turnwise.errors import DataError, first_line
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.columns import DTYPES, NO_VERSION, Origin
from turnwise.record.invariants import check_trajectory
from turnwise.record.limit import ReachedLimit
from turnwise.record.lineage import RecordLineage
from turnwise.record.open_columns import decode_column, encode, keep_open
from turnwise.record.outside_call import OutsideCall
from turnwise.record.result import EpisodeResult, total_score
from turnwise.record.trajectory import Trajectory
from turnwise.report import Report
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
from turnwise_result_files.media import DECLARATION, MediaFolder, open_column
from turnwise_result_files.row_checks import check_row, parse_json
from turnwise_result_files.row_file import plain_text, to_json
from turnwise_result_files.row_schema import ARRAYS, ATTEMPT, COUNTS, FAULT, JSON, LIMIT, SCHEMA, SECONDS, Row

_SCORES: Final[Mapping[str, type[TurnScore] | type[TokenScore]]] = {"turn": TurnScore, "token": TokenScore}
_REQUEST: Final = ("rollout_n", "global_step", "validation")

_MAX_COLUMN_BYTES: Final = 2**30
"""Most bytes of the open columns of an episode: all of its rows are one batch, in which Arrow takes 2 GiB of base64."""

# Episodes to rows


def without_odd_values(result: EpisodeResult, error: Exception) -> EpisodeResult:
    """Return an episode with the values that every file takes, failed by the owner of the others."""
    owner = result.fault.owner if result.fault else "reward" if result.scores else "agent"
    index, messages, extra = result.task.sample_index, result.task.messages, result.task.extra
    fits = isinstance(index, int) and 0 <= index < 2**63
    task = evolve(
        result.task,
        sample_index=index if fits else -1,
        messages=tuple(each for each in messages if isinstance(each, Mapping)),
        extra=extra if isinstance(extra, Mapping) else {},
    )
    return evolve(
        result,
        task=task,
        status=Status.FAILED,
        fault=Fault(owner=owner, kind=type(error).__name__, message=f"cannot be written: {first_line(error)}"),
        scores=(),
        trajectories=tuple(_without_odd_columns(result.trajectories)),
        messages=tuple(each for each in result.messages if isinstance(each, Mapping)),
        metrics=EpisodeMetrics(),
    )


def rows_of(result: EpisodeResult, decode: Callable[[TokenArray], str] | None, media: MediaFolder) -> list[Row]:
    """
    Return a row for each trajectory, or one for an episode without any; `DataError` if the scores do not fit.

    The pictures are written to `media`, and the rows refer to them.
    """
    if result.scores and len(result.scores) != len(result.trajectories):
        counts = f"{len(result.scores)} scores for {len(result.trajectories)} trajectories"
        raise DataError(f"episode {result.uid}: {counts}")
    _check_size(result.trajectories)
    shared = _shared_columns(result, media)
    if not result.trajectories:
        return [shared]
    scores: Sequence[Score | None] = result.scores or [None] * len(result.trajectories)
    lineage: Sequence[RecordLineage | None] = result.lineage or [None] * len(result.trajectories)
    return [
        shared | {"trajectory_index": index} | _record_columns(record, line, decode, media) | _score_columns(score)
        for index, (record, line, score) in enumerate(zip(result.trajectories, lineage, scores, strict=True))
    ]


def _shared_columns(result: EpisodeResult, media: MediaFolder) -> Row:
    task, metrics = result.task, result.metrics
    fault = {f"fault_{name}": plain_text(getattr(result.fault, name)) for name in FAULT} if result.fault else {}
    limit = result.limit and asdict(evolve(result.limit, reason=plain_text(result.limit.reason)))
    return dict.fromkeys(SCHEMA.names) | {
        "uid": plain_text(task.uid),
        "sample_index": task.sample_index,
        **{name: getattr(result, name) for name in _REQUEST},
        "objective": str(result.objective),
        "agent_name": plain_text(result.agent_name),
        "data_source": plain_text(task.data_source),
        "status": str(result.status),
        **{name: plain_text(getattr(result, name)) for name in ATTEMPT},
        **fault,
        **{f"limit_{name}": value for name, value in (limit or {}).items()},
        "messages": media.put_messages(result.messages),
        "ground_truth": task.ground_truth,
        "task_messages": media.put_messages(task.messages),
        "task_agent_name": plain_text(task.agent_name),
        "task_extra": task.extra,
        **{name: getattr(metrics, name) for name in (*COUNTS, *SECONDS, "mask_ratio", "tool_reward", "num_tokens")},
        "replicas": list(metrics.replicas),
        "outside_calls": list(map(_outside_columns, result.outside_calls)),
        "reports": list(map(_report_columns, result.reports)),
        "metrics_extra": metrics.extra,
    }


def _report_columns(report: Report) -> Row:
    texts = {name: plain_text(getattr(report, name)) for name in ("title", "text")}
    facts = {plain_text(name): value for name, value in report.facts.items()}
    return texts | {"facts": json.dumps(to_json(facts)), "failed": bool(report.failed), "num_turns": report.num_turns}


def read_report(row: Row) -> Report:
    """Return a report of a row."""
    return Report(**row | {"facts": parse_json("reports.facts", row["facts"])})


def _outside_columns(call: OutsideCall) -> Row:
    return {name: plain_text(value) if isinstance(value, str) else value for name, value in asdict(call).items()}


def _record_columns(
    record: Trajectory, line: RecordLineage | None, decode: Callable[[TokenArray], str] | None, media: MediaFolder
) -> Row:
    pictures = [open_column(record, media)] if record.pictures else []
    texts = {name: plain_text(getattr(line, name)) for name in ("kind", "label")} if line else {}
    return {
        "lineage": line and asdict(line) | texts,
        **{name: getattr(record, name) for name in ARRAYS},
        "segments": [
            {"origin": s.origin.name.lower(), "start": s.start, "stop": s.stop, "block": s.block, "path": s.path}
            for s in record.segments
        ],
        "open_columns": [*(_open_column(record, name) for name in record.columns), *pictures] or None,
        "prompt_text": plain_text(decode(record.prompt_ids)) if decode else None,
        "response_text": plain_text(decode(record.response_ids)) if decode else None,
    }


def _open_column(record: Trajectory, name: str) -> Row:
    declaration = json.dumps(record.columns[name].to_dict())
    return {"name": name, "declaration": declaration, "values": encode(record.column(name))["data"]}


def _check_size(records: Sequence[Trajectory]) -> None:
    """Raise `DataError` where the open columns of an episode are too large for the file."""
    num_bytes = sum(record.column(name).nbytes for record in records for name in record.columns)
    if num_bytes > _MAX_COLUMN_BYTES:
        raise DataError(f"the columns of the episode have {num_bytes} bytes; a file takes {_MAX_COLUMN_BYTES}")


def _without_odd_columns(records: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Yield the records of an episode without the open columns that no file takes."""
    room = _MAX_COLUMN_BYTES
    for record in records:
        kept: set[str] = set()
        for name in record.columns:
            with suppress(Exception):  # such as a declaration that is no JSON
                if (num_bytes := record.column(name).nbytes) <= room and _open_column(record, name):
                    kept.add(name)
                    room -= num_bytes
        all_kept = len(kept) == len(record.columns)
        yield record if all_kept else Trajectory.from_dict(keep_open(record.to_dict(), kept))


def _score_columns(score: Score | None) -> Row:
    if score is None:
        return {}
    columns: Row = {"reward": total_score(score), "score_extra": score.extra}
    if isinstance(score, TrajectoryScore):
        return columns | {"score_level": "trajectory", "score_values": [score.value], "score_at": str(score.at)}
    level = "turn" if isinstance(score, TurnScore) else "token"
    return columns | {"score_level": level, "score_values": list(score.values)}


# Rows to episodes


def read_episode(row: Row, media: MediaFolder | None = None) -> EpisodeResult:
    """Return the episode of a row, without its trajectories; without `media` its messages keep references."""
    messages, task_messages = row["messages"], row["task_messages"]
    if media is not None:
        messages, task_messages = media.get_messages(messages), media.get_messages(task_messages)
    fault = Fault(**{name: row[f"fault_{name}"] for name in FAULT}) if row["fault_owner"] is not None else None
    limit = ReachedLimit(**{name: row[f"limit_{name}"] for name in LIMIT}) if row.get("limit_name") else None
    numbers = {name: row[name] for name in (*COUNTS, *SECONDS, "mask_ratio", "tool_reward", "num_tokens")}
    return EpisodeResult(
        task=Task(
            messages=tuple(task_messages),
            uid=row["uid"],
            sample_index=row["sample_index"],
            agent_name=row["task_agent_name"],
            ground_truth=row["ground_truth"],
            data_source=row["data_source"],
            extra=row["task_extra"],
        ),
        **{name: row[name] for name in (*_REQUEST, *ATTEMPT)},
        agent_name=row["agent_name"],
        objective=row["objective"],
        status=Status(row["status"]),
        fault=fault,
        limit=limit,
        messages=tuple(messages),
        outside_calls=tuple(OutsideCall(**call) for call in row.get("outside_calls") or ()),
        reports=tuple(map(read_report, row.get("reports") or ())),
        metrics=EpisodeMetrics(**numbers, replicas=tuple(row["replicas"] or ()), extra=row["metrics_extra"]),
    )


def read_texts(rows: Sequence[Row]) -> EpisodeResult:
    """
    Return the episode of its rows, whose columns of JSON are text and whose other columns are plain values.

    Its records have no pictures, and its messages have references to them.
    """
    parsed = [row | {name: parse_json(name, row[name]) for name in JSON} for row in rows]
    for row in parsed:
        check_row(row)
    episode = read_episode(parsed[0])
    for row in parsed:
        episode = add_trajectory(episode, row)
    return episode


def take_continued(results: list[EpisodeResult], row: Row) -> EpisodeResult:
    """Take back the last episode, whose next trajectory this row must be; `ValueError` if it is not."""
    index = row["trajectory_index"]
    last = [(result.task.uid, result.rollout_n, len(result.trajectories)) for result in results[-1:]]
    if last != [(row["uid"], row["rollout_n"], index)]:
        raise ValueError(f"trajectory {index} does not follow the one before it")
    return results.pop()


def add_trajectory(result: EpisodeResult, row: Row, media: MediaFolder | None = None) -> EpisodeResult:
    """Return an episode with the trajectory of a row, if it has one; without `media` the record has no pictures."""
    if row["trajectory_index"] is None:
        return result
    scores = result.scores if row["score_level"] is None else (*result.scores, _score(row))
    lineage = result.lineage if row["lineage"] is None else (*result.lineage, RecordLineage(**row["lineage"]))
    return evolve(result, trajectories=(*result.trajectories, _trajectory(row, media)), scores=scores, lineage=lineage)


def _trajectory(row: Row, media: MediaFolder | None) -> Trajectory:
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
    saved = columns | layout | {"segments": segments, "num_prompt_tokens": len(prompt_ids)}
    open_columns = row.get("open_columns") or ()  # files of earlier versions lack it
    for each in open_columns:
        if each["declaration"] == DECLARATION and media is not None:
            saved["pictures"] = media.get_places(json.loads(each["values"]))
    record = Trajectory.from_dict(saved)
    for each in open_columns:
        if each["declaration"] == DECLARATION:
            continue
        spec = ColumnSpec.from_dict(json.loads(each["declaration"]))
        record = record.with_column(spec, decode_column(spec, each["values"]))
    check_trajectory(record)
    return record


def _score(row: Row) -> Score:
    values, extra = row["score_values"], row["score_extra"]
    if row["score_level"] == "trajectory":
        return TrajectoryScore(value=values[0], at=Placement(row["score_at"]), extra=extra)
    return _SCORES[row["score_level"]](values=tuple(values), extra=extra)
