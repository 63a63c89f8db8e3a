"""Episodes in the Agent Trajectory Interchange Format (ATIF) of Harbor."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final

from turnwise import EpisodeResult, Trajectory
from turnwise.errors import DataError
from turnwise.media import Picture
from turnwise.types import JsonDict
from turnwise_result_files.atif import Steps, add_outside_calls, add_step, build_document, token_metrics
from turnwise_result_files.media import MediaFolder
from turnwise_result_files.messages import contents_of, refuse_pictures

_MEDIA_TYPES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Of pictures, as `harbor.models.trajectories` has them since version 1.6."""


def to_atif(result: EpisodeResult, *, model: str = "", media: MediaFolder | None = None) -> JsonDict:
    """
    Return an episode as an ATIF object.

    The tokens and log-probabilities of a turn are in the metrics of its step where the episode has one record with a
    turn for each message of the model. The reward and the rest of the episode are in `extra`. Each call to another
    model than the policy is a trajectory of a sub-agent.

    Args:
        result: an episode with at least one message.
        model: name of the model.
        media: gets the pictures of the episode: an ATIF object has the paths of files.

    Raises:
        DataError: the episode has pictures and there is no `media`, or a picture is of a type that ATIF does not have.
    """
    if media is None:
        refuse_pictures(result, "an ATIF object without a folder of files")
    steps: Steps = []
    num_given = len(result.task.messages)
    for index, (message, parts) in enumerate(zip(result.messages, contents_of(result), strict=True)):
        add_step(steps, message, is_given=index < num_given, content=_content(parts, result.uid, media))
    _add_tokens([step for step in steps if step["source"] == "agent" and "is_copied_context" not in step], result)
    agent: JsonDict = {"name": result.agent_name or "agent", "version": version("turnwise")}
    if model:
        agent["model_name"] = model
    num_prompt = sum(trajectory.num_prompt_tokens for trajectory in result.trajectories)
    totals = (num_prompt, int(result.metrics.num_tokens.get("action", 0)), result.metrics.num_cached_tokens)
    document = build_document(result.uid, agent, steps, totals=totals, extra=_extra(result))
    return add_outside_calls(document, result.outside_calls)


def _content(parts: Sequence[str | Picture], uid: str, media: MediaFolder | None) -> list[dict[str, Any]] | None:
    """Return a content with pictures; None for a text."""
    if media is None or not any(isinstance(part, Picture) for part in parts):
        return None
    return [_image(part, uid, media) if isinstance(part, Picture) else {"type": "text", "text": part} for part in parts]


def _image(picture: Picture, uid: str, media: MediaFolder) -> dict[str, Any]:
    if picture.media_type not in _MEDIA_TYPES:
        raise DataError(f"episode {uid} has a picture of the type {picture.media_type}, which ATIF does not have")
    return {"type": "image", "source": {"media_type": picture.media_type, "path": media.put(picture)}}


def _add_tokens(steps: Steps, result: EpisodeResult) -> None:
    if len(result.trajectories) != 1:
        return
    (trajectory,) = result.trajectories
    turns = _turns(trajectory)
    if len(turns) != len(steps) or trajectory.has_blocks:
        return
    for step, (start, stop) in zip(steps, turns, strict=True):
        offset = trajectory.num_prompt_tokens
        logprobs = trajectory.logprobs[start - offset : stop - offset]
        step["metrics"] = token_metrics(start, trajectory.input_ids[start:stop], logprobs)


def _turns(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [(segment.start, segment.stop) for segment in trajectory.segments if segment.origin.is_turn]


def _extra(result: EpisodeResult) -> JsonDict:
    extra: JsonDict = {
        "status": str(result.status),
        "reward": result.reward,
        "task_uid": result.task.uid,
        "sample_index": result.task.sample_index,
        "rollout_n": result.rollout_n,
        "global_step": result.global_step,
    }
    if result.fault is not None:
        extra["fault"] = f"{result.fault.owner}: {result.fault.kind}: {result.fault.message}"
    return extra
