"""An episode as JSON values: its task, messages, scores and records, and the columns of a record's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from attrs import asdict
from numpy.typing import NDArray

from turnwise.errors import DataError, describe
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.columns import NO_VERSION, Origin
from turnwise.record.open_columns import decode_column
from turnwise.record.outside_call import OutsideCall
from turnwise.record.result import scored_tokens
from turnwise.types import JsonDict, Message
from turnwise_result_files.episode_rows import read_report, read_texts
from turnwise_result_files.media import DECLARATION
from turnwise_result_files.messages import calls_of
from turnwise_result_files.outside_calls import read_answer, read_messages
from turnwise_result_files.row_schema import COUNTS, FAULT, JSON, LIMIT, SECONDS
from turnwise_result_files.trajectories import UNREADABLE
from turnwise_viewer.episode_pictures import place_pictures
from turnwise_viewer.token_text import TokenTexts

Row = Mapping[str, Any]
"""A row of an episode file; columns of JSON text are text."""

_TEXTS: Final = ("agent_name", "data_source", "objective", "status", "sample_index")


def check_rows(table: pa.Table, where: str) -> list[dict[str, Any]]:
    """Return the rows of an episode after the checks of `read_results`; `DataError` if one of them finds a fault."""
    rows: list[dict[str, Any]] = table.to_pylist()
    try:
        read_texts(rows)
    except UNREADABLE as error:
        raise DataError(f"{where} cannot be read: {describe(error)}") from error
    return rows


def describe_episode(rows: Sequence[Row]) -> JsonDict:
    """Return an episode without its tokens: `rows` has a row per record, in order."""
    first = rows[0]
    texts = {name: json.loads(first[name]) for name in JSON if name != "score_extra"}
    fault = {name: first[f"fault_{name}"] for name in FAULT} if first["fault_owner"] is not None else None
    limit = {name: first[f"limit_{name}"] for name in LIMIT} if first.get("limit_name") is not None else None
    metrics = {name: first[name] for name in (*COUNTS, *SECONDS, "mask_ratio", "tool_reward")}
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "uid": first["uid"],
        "rollout_n": first["rollout_n"],
        "global_step": first.get("training_step", first["global_step"]),
        "asked_at_step": first["global_step"],
        "validation": first["validation"],
        **{name: first[name] for name in (*_TEXTS, "worker", "replicas")},
        "fault": fault,
        "limit": limit,
        "reward": sum(rewards) if rewards else None,
        "task": {
            "messages": list(map(_show_message, texts["task_messages"])),
            "ground_truth": texts["ground_truth"],
            "agent_name": first["task_agent_name"],
            "extra": texts["task_extra"],
        },
        "messages": list(map(_show_message, texts["messages"])),
        "outside_calls": [_describe_outside_call(OutsideCall(**call)) for call in first.get("outside_calls") or ()],
        "reports": [asdict(read_report(report)) for report in first.get("reports") or ()],
        "metrics": metrics | {"num_tokens": texts["num_tokens"], "extra": texts["metrics_extra"]},
        "records": [_describe_record(row) for row in rows if row["trajectory_index"] is not None],
    }


def _describe_outside_call(call: OutsideCall) -> JsonDict:
    """Return a call to another model with its messages and its answer as texts, and with the bodies as they were."""
    return {**asdict(call), "messages": list(map(_show_message, read_messages(call))), "answer": read_answer(call)}


def _show_message(message: Message) -> JsonDict:
    """Return a message of the forms that the page knows; a value of another form is shown as JSON text."""
    shown: JsonDict = {
        name: value if value is None or isinstance(value, str) else _text(value) for name, value in message.items()
    }
    shown["role"] = shown.get("role") or ""
    if _is_objects(message.get("content")):
        shown["content"] = message["content"]
    if message.get("tool_calls"):
        shown["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
            for name, function, arguments in calls_of(message)
        ]
    else:
        shown.pop("tool_calls", None)
    return shown


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _describe_record(row: Row) -> JsonDict:
    turns = _turns(row["segments"])
    return {
        "index": row["trajectory_index"],
        "lineage": row["lineage"],
        "num_prompt_tokens": len(row["prompt_ids"]),
        "num_tokens": len(row["prompt_ids"]) + len(row["response_ids"]),
        "segments": row["segments"],
        "turns": turns,
        "prompt_text": row["prompt_text"],
        "response_text": row["response_text"],
        "score": _describe_score(row, turns),
    }


def _turns(segments: Sequence[Row]) -> list[list[int]]:
    """Return the start and stop of each turn of the model, see `Trajectory.turns`."""
    turns: list[list[int]] = []
    place = None
    for segment in segments:
        if Origin[segment["origin"].upper()].is_turn:
            follows = turns and turns[-1][1] == segment["start"] and place == (segment["block"], segment["path"])
            place = segment["block"], segment["path"]
            turns.append([turns.pop()[0] if follows else segment["start"], segment["stop"]])
    return turns


def _describe_score(row: Row, turns: Sequence[Sequence[int]]) -> JsonDict | None:
    """Return a record's score and its credits: the absolute index of each credited token, and the token's reward."""
    level = row["score_level"]
    if level is None:
        return None
    values = list(row["score_values"])
    num_prompt, num_response = len(row["prompt_ids"]), len(row["response_ids"])
    if level == "token":
        places = list(range(num_prompt, num_prompt + num_response))
    elif level == "turn":
        places = _scored_tokens(row, turns)
    elif row["score_at"] == "last_action" and turns:
        places = [max(_scored_tokens(row, turns))]
    else:
        places = [num_prompt + num_response - 1] if num_response else []
    totals: dict[int, float] = {}
    for place, value in zip(places, values, strict=False):
        if level != "token" or value:
            totals[place] = totals.get(place, 0.0) + value
    credits = [[place, value] for place, value in totals.items()]
    extra = json.loads(row["score_extra"])
    return {"level": level, "at": row["score_at"], "values": values, "extra": extra, "credits": credits}


def _scored_tokens(row: Row, turns: Sequence[Sequence[int]]) -> list[int]:
    start = len(row["prompt_ids"])
    places = scored_tokens([(first - start, stop - start) for first, stop in turns], np.asarray(row["response_mask"]))
    return [start + int(place) for place in places]


def describe_tokens(row: Row, texts: TokenTexts | None) -> JsonDict:
    """
    Return the columns of a record's tokens, prompt and response: each is (T,), one value per token.

    `logprobs` and `weight_versions` are null where no policy sampled the token. `pieces` is null without a tokenizer,
    and `advantages` is null unless a training wrote the record and learned from it. `open_columns` are texts, null at
    tokens that have no value. `pictures` has the first token, the number of tokens and the file of each picture.
    """
    prompt_ids, response_ids = (np.asarray(row[name], np.int32) for name in ("prompt_ids", "response_ids"))
    ids = np.concatenate([prompt_ids, response_ids])
    num_prompt = len(prompt_ids)
    origins = np.zeros(len(ids), np.uint8)
    for segment in row["segments"]:
        origins[segment["start"] : segment["stop"]] = Origin[segment["origin"].upper()]
    versions = np.asarray(row["weight_versions"], np.int32)
    sampled = versions != NO_VERSION
    logprobs = [float(str(value)) for value in np.asarray(row["logprobs"], np.float32)]
    fill: list[None] = [None] * num_prompt
    return {
        "num_prompt_tokens": num_prompt,
        "ids": ids.tolist(),
        "pieces": None if texts is None else texts.pieces(ids),
        "origin_names": [origin.name.lower() for origin in Origin],
        "origins": origins.tolist(),
        "mask": (origins == Origin.ACTION).astype(np.uint8).tolist(),
        "logprobs": [*fill, *_where(sampled, logprobs)],
        "weight_versions": [*fill, *_where(sampled, versions.tolist())],
        **{name: list(row[name]) for name in ("position_ids", "block_start", "path_start")},
        "advantages": _advantages(row, fill),
        "open_columns": _open_columns(row, len(ids)),
        "pictures": place_pictures(row),
    }


def _open_columns(row: Row, num_tokens: int) -> dict[str, list[str | None]]:
    """Return the columns of plugins, which need not be installed: the value of each token as text."""
    found: dict[str, list[str | None]] = {}
    for each in row.get("open_columns") or ():
        if each["declaration"] == DECLARATION:
            continue
        spec = ColumnSpec.from_dict(json.loads(each["declaration"]))
        values = decode_column(spec, each["values"])
        shown = [
            None if empty else json.dumps(value)
            for value, empty in zip(values.tolist(), spec.is_fill(values), strict=True)
        ]
        found[spec.name] = [*[None] * (num_tokens - len(shown)), *shown]
    if place_pictures(row):
        found["picture file" if "picture" in found else "picture"] = _pictures(row, num_tokens)
    return found


def _pictures(row: Row, num_tokens: int) -> list[str | None]:
    """Return the file of its picture for each placeholder."""
    shown: list[str | None] = [None] * num_tokens
    for start, length, reference in place_pictures(row):
        shown[start : start + length] = [json.dumps(reference)] * length
    return shown


def _advantages(row: Row, fill: Sequence[None]) -> list[object] | None:
    values = row.get("advantages")
    if values is None:
        return None
    return [*fill, *(float(str(value)) for value in np.asarray(values, np.float32))]


def mean_advantage(rows: Sequence[Row]) -> float | None:
    """Return the mean advantage of an episode's sampled tokens; None if no training learned from them."""
    pairs = [(row["advantages"], row["response_mask"]) for row in rows if row["advantages"] is not None]
    if not pairs:
        return None
    advantages, masks = (np.concatenate([np.asarray(each) for each in column]) for column in zip(*pairs, strict=True))
    return float(advantages[masks == 1].mean()) if (masks == 1).any() else None


def _where(keep: NDArray[np.bool_], values: Sequence[object]) -> list[object]:
    return [value if kept else None for kept, value in zip(keep.tolist(), values, strict=True)]
