"""Episodes in the Agent Trajectory Interchange Format (ATIF) of Harbor."""

from __future__ import annotations

from importlib.metadata import version

from turnwise import EpisodeResult, Trajectory
from turnwise.types import JsonDict
from turnwise_result_files.atif import Steps, add_outside_calls, add_step, build_document, token_metrics
from turnwise_result_files.messages import refuse_pictures


def to_atif(result: EpisodeResult, *, model: str = "") -> JsonDict:
    """
    Return an episode as an ATIF object.

    The tokens and log-probabilities of a turn are in the metrics of its step where the episode has one record with a
    turn for each message of the model. The reward and the rest of the episode are in `extra`. Each call to another
    model than the policy is a trajectory of a sub-agent.

    Args:
        result: an episode with at least one message.
        model: name of the model.
    """
    refuse_pictures(result, "ATIF")
    steps: Steps = []
    num_given = len(result.task.messages)
    for index, message in enumerate(result.messages):
        add_step(steps, message, is_given=index < num_given)
    _add_tokens([step for step in steps if step["source"] == "agent" and "is_copied_context" not in step], result)
    agent: JsonDict = {"name": result.agent_name or "agent", "version": version("turnwise")}
    if model:
        agent["model_name"] = model
    num_prompt = sum(trajectory.num_prompt_tokens for trajectory in result.trajectories)
    totals = (num_prompt, int(result.metrics.num_tokens.get("action", 0)), result.metrics.num_cached_tokens)
    document = build_document(result.uid, agent, steps, totals=totals, extra=_extra(result))
    return add_outside_calls(document, result.outside_calls)


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
