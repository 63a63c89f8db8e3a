"""Episodes as a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from turnwise import EpisodeResult
from turnwise.errors import ConfigError
from turnwise.record.result import total_score
from turnwise.types import Message
from turnwise_result_files import read_results
from turnwise_result_files.messages import calls_of, refuse_pictures, text_of


def to_dataset(results: str | Path | Iterable[EpisodeResult]) -> Any:
    """
    Return a `datasets.Dataset` with a row for each trajectory.

    Columns: uid, rollout_n, global_step, agent_name, status, reward (of the row; null without a score), messages,
    prompt_ids (P), response_ids (R), response_mask (R), logprobs (R).

    Args:
        results: folder or file of a rollout, or episodes.

    Raises:
        ConfigError: the package `datasets` is not installed.
        DataError: the file cannot be read.
    """
    try:
        from datasets import Dataset, Features, List, Value
    except ImportError as error:
        raise ConfigError(f"{error}; pip install 'turnwise-conversions[datasets]'") from error
    episodes = read_results(results) if isinstance(results, str | Path) else results
    text = Value("string")
    call = {"id": text, "name": text, "arguments": text}
    message = {"role": text, "content": text, "tool_calls": List(call), "tool_call_id": text}
    features = Features(
        {
            **dict.fromkeys(("uid", "agent_name", "status"), text),
            **dict.fromkeys(("rollout_n", "global_step"), Value("int64")),
            "reward": Value("float64"),
            "messages": List(message),
            **dict.fromkeys(("prompt_ids", "response_ids"), List(Value("int32"))),
            "response_mask": List(Value("uint8")),
            "logprobs": List(Value("float32")),
        }
    )
    return Dataset.from_list([row for each in episodes for row in rows_of(each)], features=features)


def rows_of(result: EpisodeResult) -> Iterator[dict[str, Any]]:
    """Yield the row of each trajectory of an episode; none for an episode that has not started."""
    refuse_pictures(result, "the data set")
    for index, trajectory in enumerate(result.trajectories):
        yield {
            "uid": result.task.uid,
            "rollout_n": result.rollout_n,
            "global_step": result.global_step,
            "agent_name": result.agent_name,
            "status": str(result.status),
            "reward": total_score(result.scores[index]) if result.scores else None,
            "messages": [_message(message) for message in result.messages],
            "prompt_ids": trajectory.prompt_ids.tolist(),
            "response_ids": trajectory.response_ids.tolist(),
            "response_mask": trajectory.response_mask.tolist(),
            "logprobs": trajectory.logprobs.tolist(),
        }


def _message(message: Message) -> dict[str, Any]:
    calls = [{"id": name, "name": function, "arguments": text} for name, function, text in calls_of(message)]
    return {
        "role": str(message["role"]),
        "content": text_of(message),
        "tool_calls": calls,
        "tool_call_id": message.get("tool_call_id"),
    }
