"""
Unfinished episodes in a file: JSON lines of plain types, so that another process can go on with them.

The first line names the format and its version, every other one is an episode. What is read is checked by the promises
of the token record before anything runs on it. Nothing is ever pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from attrs import asdict, evolve

from turnwise.episode_spec import Counters, EpisodeSpec, KeptCall, KeptReply, KeptTurn, UnfinishedEpisode
from turnwise.errors import DataError, TurnwiseError
from turnwise.invariants import check_trajectory
from turnwise.trajectory import Trajectory
from turnwise.types import FinishReason, GenerateResult, SamplingParams, Task, ToolCall, ToolResult

FORMAT: Final = "turnwise unfinished episodes"
VERSION: Final = 1


def save_unfinished(path: str | Path, episodes: Iterable[UnfinishedEpisode]) -> None:
    """
    Write unfinished episodes; the file gets its name when it is complete, and replaces one of that name.

    An episode whose notes are not JSON values cannot go on elsewhere: it is written as one that never began, which is
    logged.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format": FORMAT, "version": VERSION}) + "\n")
        file.writelines(_line(episode) + "\n" for episode in episodes)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target)


def load_unfinished(path: str | Path) -> list[UnfinishedEpisode]:
    """
    Read unfinished episodes, for `RolloutManager.generate(..., resume=...)`.

    Raises:
        DataError: there is no such file, it is of another kind or version, or an episode in it cannot be: the text
            names the line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    _refuse_other_format(file, lines)
    found = []
    for number, line in enumerate(lines[1:], 2):
        try:
            found.append(_checked(_episode(json.loads(line))))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, TurnwiseError) as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(f"{file}, line {number}: not an unfinished episode: {what}") from error
    return found


def _refuse_other_format(file: Path, lines: list[str]) -> None:
    try:
        header = json.loads(lines[0]) if lines else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{file}: not a file of unfinished episodes")
    if header.get("version") != VERSION:
        raise DataError(f"{file}: has version {header.get('version')}, this turnwise reads version {VERSION}")


def _checked(episode: UnfinishedEpisode) -> UnfinishedEpisode:
    """Refuse an episode whose records break a promise, or whose kept turns have no place in them."""
    for trajectory in episode.trajectories:
        closed = trajectory.rewound(trajectory.mark())
        closed.close()
        check_trajectory(closed)
    for turn in episode.turns:
        if len(turn.place) != 4 or turn.place[0] < len(episode.trajectories):
            raise ValueError(f"a turn at {turn.place} has no place in {len(episode.trajectories)} records")
        if not np.isfinite(turn.result.logprobs).all() or np.min(turn.result.weight_version, initial=0) < 0:
            raise ValueError("a turn has a log-probability that is not finite, or a weight version below 0")
    return episode


# Episodes to JSON


def _line(episode: UnfinishedEpisode) -> str:
    try:
        return json.dumps(_row(episode), allow_nan=False)
    except (TypeError, ValueError) as error:
        structlog.get_logger().error(
            "episode cannot be kept: its notes are no JSON", episode=episode.uid, why=str(error)
        )
        return json.dumps(_row(UnfinishedEpisode(spec=episode.spec, began=False)), default=str)


def _row(episode: UnfinishedEpisode) -> dict[str, Any]:
    plain = {name: getattr(episode, name) for name in _PLAIN}
    return plain | {
        "spec": asdict(evolve(episode.spec, unfinished=None), filter=lambda each, _value: each.name != "unfinished"),
        "memory": episode.memory,
        "trajectories": [_plain(trajectory.to_dict()) for trajectory in episode.trajectories],
        "turns": [
            {"place": turn.place, "seconds": turn.seconds, "result": _plain(asdict(turn.result))}
            for turn in episode.turns
        ],
        "calls": [asdict(call) for call in episode.calls],
        "replies": [asdict(reply) for reply in episode.replies],
        "counters": asdict(episode.counters),
    }


_PLAIN: Final = (
    *("began", "state", "messages", "last_finish", "objective", "num_steps", "spent_s", "released_reward"),
    *("tool_notes", "interaction_notes", "num_cuts"),
)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


# JSON to episodes


def _episode(row: dict[str, Any]) -> UnfinishedEpisode:
    plain = {name: row.pop(name) for name in _PLAIN}
    last_finish = plain["last_finish"]
    return UnfinishedEpisode(
        **plain | {"messages": tuple(plain["messages"]), "last_finish": last_finish and FinishReason(last_finish)},
        spec=_spec(row.pop("spec")),
        memory=dict(row.pop("memory")),
        trajectories=tuple(map(Trajectory.from_dict, row.pop("trajectories"))),
        turns=tuple(map(_turn, row.pop("turns"))),
        calls=tuple(_call(each) for each in row.pop("calls")),
        replies=tuple(KeptReply(**each) for each in row.pop("replies")),
        counters=Counters(**row.pop("counters")),
        **row,  # nothing, or a name that is refused
    )


def _spec(row: dict[str, Any]) -> EpisodeSpec:
    task, sampling = row.pop("task"), row.pop("sampling")
    stops: dict[str, Any] = {name: tuple(sampling.pop(name)) for name in ("stop_token_ids", "stop")}
    return EpisodeSpec(
        task=Task(**task | {"messages": tuple(task["messages"])}),
        sampling=SamplingParams(**sampling, **stops),
        **row,
    )


def _turn(row: dict[str, Any]) -> KeptTurn:
    result = row["result"]
    version = result["weight_version"]
    return KeptTurn(
        place=tuple(row["place"]),
        seconds=row["seconds"],
        result=GenerateResult(
            **result
            | {
                "finish_reason": FinishReason(result["finish_reason"]),
                "weight_version": version if isinstance(version, int) else np.array(version, np.int32),
            }
        ),
    )


def _call(row: dict[str, Any]) -> KeptCall:
    return KeptCall(call=ToolCall(**row["call"]), result=ToolResult(**row["result"]), seconds=row["seconds"])
