"""
Reads and writes unfinished episodes as JSON lines, so that another process can resume them.

The first line contains the format and its version. Every other line is an episode. The reader checks the invariants of
the token records, because an edited or damaged file must not enter a training batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from attrs import asdict, evolve

from turnwise.errors import DataError, TurnwiseError, describe
from turnwise.files import atomic_write
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.ended import EndedEpisode
from turnwise.record.invariants import check_trajectory
from turnwise.record.limit import ReachedLimit
from turnwise.record.lineage import EpisodeRecord, RecordLineage
from turnwise.record.open_columns import decode, encode, to_plain
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.step_results import Counters, RecordedCall, RecordedTurn, TurnPosition
from turnwise.record.trajectory import Trajectory
from turnwise.report import Report
from turnwise.types import (
    Array,
    FinishReason,
    GenerateResult,
    JsonDict,
    Reply,
    SamplingParams,
    Task,
    ToolCall,
    ToolResult,
)
from turnwise_result_files.episode_rows import add_trajectory, read_episode, rows_of
from turnwise_result_files.media import MediaFolder
from turnwise_result_files.row_file import to_json

FORMAT: Final = "turnwise unfinished episodes"
VERSION: Final = 2
Row = dict[str, Any]
"""An episode, or a part of one, as JSON; the classes check the types when they are made."""


def save_unfinished(path: str | Path, episodes: Iterable[UnfinishedEpisode]) -> None:
    """
    Write unfinished episodes; an existing file is replaced when the new one is complete.

    An episode whose notes are not JSON values is logged and written as one that has not started. Pictures go to the
    folder `media` beside the file.
    """
    media = MediaFolder(Path(path).parent)
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"format": FORMAT, "version": VERSION}) + "\n")
        file.writelines(_to_line(episode, media) + "\n" for episode in episodes)


def load_unfinished(path: str | Path) -> list[UnfinishedEpisode]:
    """
    Read unfinished episodes, for `RolloutManager.generate(..., resume=...)`.

    Raises:
        DataError: the file cannot be read, has another format or version, or contains an invalid episode; the text
            names the line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    _check_header(file, lines)
    episodes, media = [], MediaFolder(file.parent)
    for number, line in enumerate(lines[1:], 2):
        try:
            episode = _to_episode(json.loads(line), media)
            _check_episode(episode)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            TurnwiseError,
        ) as error:
            raise DataError(f"{file}, line {number}: not an unfinished episode: {describe(error)}") from error
        episodes.append(episode)
    return episodes


def _check_header(file: Path, lines: list[str]) -> None:
    try:
        header = json.loads(lines[0]) if lines else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError(f"{file}: not a file of unfinished episodes")
    if header.get("version") != VERSION:
        raise DataError(f"{file}: has version {header.get('version')}, but this turnwise reads version {VERSION}")


def _check_episode(episode: UnfinishedEpisode) -> None:
    for trajectory in episode.trajectories:
        closed = trajectory.rewound(trajectory.mark())  # a copy: the episode itself may have an open block
        closed.close()
        check_trajectory(closed)
    if isinstance(episode, EndedEpisode):
        for trajectory in episode.result.trajectories:
            check_trajectory(trajectory)
    for turn in episode.turns:
        # A position in a closed record, or before its end, would never be replayed: its tokens would be lost silently.
        if len(turn.position) != 4 or not _has_place(episode, turn.position):
            raise ValueError(f"turn position {turn.position} does not fit {len(episode.records)} records")
        if not np.isfinite(turn.result.logprobs).all() or np.min(turn.result.weight_version, initial=0) < 0:
            raise ValueError("a turn has a log-probability that is not finite, or a weight version below 0")


def _has_place(episode: UnfinishedEpisode, position: TurnPosition) -> bool:
    record, num_tokens, _path, _own = position
    if not 1 <= record <= len(episode.records):
        return record > 0
    found = episode.records[record - 1]
    return found.is_open and num_tokens >= len(found.trajectory)


# Episodes to JSON


def _to_line(episode: UnfinishedEpisode, media: MediaFolder) -> str:
    try:
        return json.dumps(_to_row(episode, media), allow_nan=False)
    except OSError:  # the disk takes no picture
        raise
    except Exception as error:  # noqa: BLE001 - plugins may keep anything
        # One plugin with odd notes must not lose the other episodes of the file.
        structlog.get_logger().error(
            "episode restarts from its prompt: its notes are not JSON values",
            episode=episode.uid,
            reason=describe(error),
        )
        return json.dumps(_to_row(UnfinishedEpisode(spec=_plain_spec(episode.spec), started=False), media))


def _plain_spec(spec: EpisodeSpec) -> EpisodeSpec:
    """Return a spec whose task has JSON values alone."""
    plain: Row = {name: to_json(getattr(spec.task, name)) for name in ("messages", "ground_truth", "extra")}
    return evolve(spec, task=evolve(spec.task, **plain | {"messages": tuple(plain["messages"])}))


_JSON_FIELDS: Final = (
    *("started", "state", "messages", "last_finish", "objective", "num_steps", "spent_s", "released_reward"),
    *("tool_notes", "interaction_notes", "num_interruptions"),
)


def _to_row(episode: UnfinishedEpisode, media: MediaFolder) -> JsonDict:
    return {name: getattr(episode, name) for name in _JSON_FIELDS} | {
        "messages": media.put_messages(episode.messages),
        "spec": _spec_to_row(episode.spec, media),
        "memory": episode.memory,
        "records": [_record_to_row(record, media) for record in episode.records],
        "turns": [
            {
                "position": turn.position,
                "seconds": turn.seconds,
                "is_constrained": turn.is_constrained,
                "result": _result_to_row(turn.result),
                "specs": [spec.to_dict() for spec in turn.specs.values()],
            }
            for turn in episode.turns
        ],
        "calls": [_call_to_row(call, media) for call in episode.calls],
        "replies": [asdict(reply) for reply in episode.replies],
        "counters": asdict(episode.counters),
        "reports": [asdict(report) for report in episode.reports],
        "reached": episode.reached and asdict(episode.reached),
        "ended": to_json(rows_of(episode.result, None, media)) if isinstance(episode, EndedEpisode) else None,
    }


def _spec_to_row(spec: EpisodeSpec, media: MediaFolder) -> JsonDict:
    task = evolve(spec.task, messages=tuple(media.put_messages(spec.task.messages)))
    return asdict(evolve(spec, unfinished=None, task=task), filter=lambda each, _value: each.name != "unfinished")


def _call_to_row(call: RecordedCall, media: MediaFolder) -> JsonDict:
    row = asdict(evolve(call, result=evolve(call.result, pictures=())))
    if row["result"].pop("pictures", ()) or call.result.pictures:
        row["result"]["pictures"] = [media.put(each) for each in call.result.pictures]
    if not call.result.picture_places:
        del row["result"]["picture_places"]
    return row


def _result_to_row(result: GenerateResult) -> object:
    columns = None if result.columns is None else {name: encode(values) for name, values in result.columns.items()}
    return to_json(asdict(evolve(result, columns=None)) | {"columns": columns})


def _record_to_row(record: EpisodeRecord, media: MediaFolder) -> JsonDict:
    return {
        "tokens": to_json(to_plain(media.put_saved(record.trajectory.to_dict()))),
        "seed_name": record.seed_name,
        "lineage": record.lineage and asdict(record.lineage),
        "is_open": record.is_open,
    }


# JSON to episodes


def _to_episode(row: Row, media: MediaFolder) -> UnfinishedEpisode:
    plain = {name: row.pop(name) for name in _JSON_FIELDS}
    plain["messages"] = media.get_messages(plain["messages"])
    row["spec"]["task"]["messages"] = media.get_messages(row["spec"]["task"]["messages"])
    last_finish = plain["last_finish"]
    if ended := row.pop("ended", None):  # files of earlier versions lack it
        result = read_episode(ended[0], media)
        for each in ended:
            result = add_trajectory(result, each, media)
        return EndedEpisode(spec=_to_spec(row["spec"]), result=result)
    return UnfinishedEpisode(
        **plain | {"messages": tuple(plain["messages"]), "last_finish": last_finish and FinishReason(last_finish)},
        spec=_to_spec(row.pop("spec")),
        memory=dict(row.pop("memory")),
        records=tuple(_to_record(each, media) for each in row.pop("records")),
        turns=tuple(map(_to_turn, row.pop("turns"))),
        calls=tuple(_to_call(each, media) for each in row.pop("calls")),
        replies=tuple(Reply(**each) for each in row.pop("replies")),
        counters=_to_counters(row.pop("counters")),
        reports=tuple(Report(**each) for each in row.pop("reports", ())),  # files of earlier versions lack it
        reached=_to_limit(row.pop("reached", None)),  # files of earlier versions lack it
        **row,  # empty, or unknown names that the class rejects
    )


def _to_counters(row: Row) -> Counters:
    row.pop("num_turns", None)  # files of earlier versions have it
    return Counters(**row)


def _to_limit(row: Row | None) -> ReachedLimit | None:
    return None if row is None else ReachedLimit(**row)


def _to_record(row: Row, media: MediaFolder) -> EpisodeRecord:
    lineage = row.pop("lineage")
    trajectory = Trajectory.from_dict(media.get_saved(row.pop("tokens")))
    record = EpisodeRecord(trajectory, lineage=lineage and RecordLineage(**lineage), **row)
    if not record.is_open:
        record.close()
    return record


def _to_spec(row: Row) -> EpisodeSpec:
    task, sampling = row.pop("task"), row.pop("sampling")
    stops: Row = {name: tuple(sampling.pop(name)) for name in ("stop_token_ids", "stop")}
    return EpisodeSpec(
        task=Task(**task | {"messages": tuple(task["messages"])}),
        sampling=SamplingParams(**sampling, **stops),
        **row,
    )


def _to_turn(row: Row) -> RecordedTurn:
    result = row["result"]
    version, columns = result["weight_version"], result.get("columns")  # files of earlier versions lack it
    found = map(ColumnSpec.from_dict, row.get("specs", ()))  # files of earlier versions lack it
    specs = {spec.name: spec for spec in found}
    return RecordedTurn(
        position=tuple(row["position"]),
        specs=specs,
        seconds=row["seconds"],
        is_constrained=row.get("is_constrained", False),  # files of earlier versions lack it
        result=GenerateResult(
            **result
            | {
                "finish_reason": FinishReason(result["finish_reason"]),
                "weight_version": version if isinstance(version, int) else np.array(version, np.int32),
                "columns": columns and {name: _decode(values, specs.get(name)) for name, values in columns.items()},
            }
        ),
    )


def _decode(values: Row, spec: ColumnSpec | None) -> Array:
    return decode(values) if spec is None else spec.read(decode(values))


def _to_call(row: Row, media: MediaFolder) -> RecordedCall:
    if "pictures" in row["result"]:
        row["result"]["pictures"] = tuple(map(media.get, row["result"]["pictures"]))
    report = row["result"].pop("report", None)  # files of earlier versions lack it
    result = ToolResult(**row["result"], report=report and Report(**report))
    return RecordedCall(call=ToolCall(**row["call"]), result=result, seconds=row["seconds"])
