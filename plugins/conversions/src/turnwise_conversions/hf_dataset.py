"""Episodes as a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from turnwise import EpisodeResult
from turnwise.errors import ConfigError
from turnwise.media import Picture
from turnwise.record.result import total_score
from turnwise.types import Message
from turnwise_result_files import read_results
from turnwise_result_files.messages import calls_of, contents_of, has_pictures, refuse_pictures, text_of


def to_dataset(results: str | Path | Iterable[EpisodeResult]) -> Any:
    """
    Return a `datasets.Dataset` with a row for each trajectory.

    Columns: uid, rollout_n, global_step, agent_name, status, reward (of the row; null without a score), messages,
    prompt_ids (P), response_ids (R), response_mask (R), logprobs (R).

    If an episode has pictures, contents of all messages are lists of parts with `type` and `text`, and the column
    `images` has the bytes of the pictures in the order of the parts of the type `image`, as TRL has them.

    Args:
        results: folder or file of a rollout, or episodes.

    Raises:
        ConfigError: the package `datasets` is not installed.
        DataError: the file cannot be read, or a record has a picture that no message shows.
    """
    try:
        from datasets import Dataset, Features, Image, List, Value
    except ImportError as error:
        raise ConfigError(f"{error}; pip install 'turnwise-conversions[datasets]'") from error
    episodes = read_results(results) if isinstance(results, str | Path) else list(results)
    illustrated = any(map(has_pictures, episodes))
    text = Value("string")
    call = {"id": text, "name": text, "arguments": text}
    content = List({"type": text, "text": text}) if illustrated else text
    message = {"role": text, "content": content, "tool_calls": List(call), "tool_call_id": text}
    features = Features(
        {
            **dict.fromkeys(("uid", "agent_name", "status"), text),
            **dict.fromkeys(("rollout_n", "global_step"), Value("int64")),
            "reward": Value("float64"),
            "messages": List(message),
            **dict.fromkeys(("prompt_ids", "response_ids"), List(Value("int32"))),
            "response_mask": List(Value("uint8")),
            "logprobs": List(Value("float32")),
            **({"images": List(Image())} if illustrated else {}),
        }
    )
    rows = [row for each in episodes for row in rows_of(each, illustrated=illustrated)]
    return Dataset.from_list(rows, features=features)


def rows_of(result: EpisodeResult, *, illustrated: bool = False) -> Iterator[dict[str, Any]]:
    """
    Yield the row of each trajectory of an episode; none for an episode that has not started.

    `illustrated` rows have lists of parts as contents, and the column `images`; others raise `DataError` for pictures.
    """
    if not illustrated:
        refuse_pictures(result, "a data set of texts")
    contents = contents_of(result)
    shown = [part for content in contents for part in content if isinstance(part, Picture)]
    messages = [
        _message(message, [_part(part) for part in parts] if illustrated else text_of(message))
        for message, parts in zip(result.messages, contents, strict=True)
    ]
    for index, trajectory in enumerate(result.trajectories):
        yield {
            "uid": result.task.uid,
            "rollout_n": result.rollout_n,
            "global_step": result.global_step,
            "agent_name": result.agent_name,
            "status": str(result.status),
            "reward": total_score(result.scores[index]) if result.scores else None,
            "messages": messages,
            "prompt_ids": trajectory.prompt_ids.tolist(),
            "response_ids": trajectory.response_ids.tolist(),
            "response_mask": trajectory.response_mask.tolist(),
            "logprobs": trajectory.logprobs.tolist(),
            **({"images": [{"bytes": picture.data, "path": None} for picture in shown]} if illustrated else {}),
        }


def _part(part: str | Picture) -> dict[str, str | None]:
    return {"type": "image", "text": None} if isinstance(part, Picture) else {"type": "text", "text": part}


def _message(message: Message, content: str | list[dict[str, str | None]]) -> dict[str, Any]:
    calls = [{"id": name, "name": function, "arguments": text} for name, function, text in calls_of(message)]
    return {
        "role": str(message["role"]),
        "content": content,
        "tool_calls": calls,
        "tool_call_id": message.get("tool_call_id"),
    }
