"""Recorded traces for the routing simulator: trace files, and results of rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from attrs import asdict, evolve

from turnwise import structure
from turnwise.errors import ConfigError, DataError
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise_result_files import read_results
from turnwise_routing_bench.traces import ReplicaEvent, Trace, TraceTrajectory, TraceTurn


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write JSONL with one line per `TraceTrajectory` and one per `ReplicaEvent`, with the fields of these classes."""
    rows = [*map(asdict, trace.trajectories), *map(asdict, trace.events)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def load_trace(path: str | Path) -> Trace:
    """
    Read a trace; its name is the stem of the file name.

    Args:
        path: JSONL in the format of `save_trace`, in which lines with the key `replica` are events; or the results of
            a rollout, as Parquet or as the folder of a run (see `build_trace`).

    Raises:
        DataError: the file cannot be read, or a line is invalid; the text names file and line.
    """
    file = Path(path)
    if file.suffix == ".parquet" or file.is_dir():
        return build_trace(read_results(file), file.stem)
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    rows = [_trace_row(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    trajectories = tuple(row for row in rows if isinstance(row, TraceTrajectory))
    if not trajectories:
        raise DataError(f"{file}: has no trajectory; expected a line per trajectory")
    try:
        events = tuple(row for row in rows if isinstance(row, ReplicaEvent))
        return Trace(name=file.stem, trajectories=trajectories, events=events)
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error


def build_trace(results: Sequence[EpisodeResult], name: str) -> Trace:
    """
    Return the workload of a rollout as a trace: all episodes start at once, and episodes of a task share the prompt.

    Results hold the tool seconds of an episode, not of each call, so they are spread evenly over the gaps between its
    turns. Records without a turn of the model are left out.

    Raises:
        DataError: no record has a turn.
    """
    trajectories = []
    for number, result in enumerate(results):
        records = [_turns(trajectory) for trajectory in result.trajectories]
        gaps = sum(len(turns) - 1 for turns in records if turns)
        tool_s = result.metrics.tool_s / gaps if gaps else 0.0
        for index, (record, turns) in enumerate(zip(result.trajectories, records, strict=True)):
            if turns:
                timed = (*(evolve(turn, tool_s=tool_s) for turn in turns[:-1]), turns[-1])
                each = TraceTrajectory(
                    trajectory_id=f"e{number}" + (f"/{index}" if index else ""),
                    num_prompt_tokens=max(1, record.num_prompt_tokens),
                    turns=timed,
                    group_id=result.task.uid,
                )
                trajectories.append(each)
    if not trajectories:
        raise DataError(f"{name}: has no turn of a model, so there is nothing to replay")
    return Trace(name=name, trajectories=tuple(trajectories))


def _turns(record: Trajectory) -> tuple[TraceTurn, ...]:
    """Return the contiguous runs of sampled tokens, each with the number of other tokens after it."""
    runs = [
        (sampled, sum(segment.stop - segment.start for segment in segments))
        for sampled, segments in groupby(record.segments, key=lambda segment: segment.origin.is_turn)
    ]
    turns: list[TraceTurn] = []
    for sampled, num_tokens in runs:
        if sampled:
            turns.append(TraceTurn(num_new_tokens=num_tokens))
        elif turns:
            turns[-1] = evolve(turns[-1], num_observation_tokens=num_tokens)
    return tuple(turns)


def _trace_row(line: str, where: str) -> TraceTrajectory | ReplicaEvent:
    try:
        row = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: invalid JSON: {error}") from None
    try:
        if isinstance(row, dict) and "replica" in row:
            return structure(row, ReplicaEvent)
        return structure(row, TraceTrajectory)
    except ConfigError as error:
        raise DataError(f"{where}: {'; '.join(str(error).splitlines())}") from None


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
