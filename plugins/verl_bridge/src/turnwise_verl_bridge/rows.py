"""Converts episodes to verl's formats: agent loop outputs, TransferQueue rows and a DataProto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise import EpisodeResult, RolloutBatch, Trajectory
from turnwise.errors import ConfigError, InfrastructureError
from turnwise_moe_routes.shapes import COLUMN
from turnwise_verl_bridge.pictures import VisionRows, images_of
from turnwise_verl_bridge.timing import batch_timing


def check_trainable(result: EpisodeResult) -> None:
    """
    Check that verl can train on an episode.

    Raises:
        InfrastructureError: the episode failed or has no trajectory to train; verl must not count it as a reward of 0.
        ConfigError: it has parallel paths; verl's engines support neither their mask nor their positions.
    """
    if not result.trainable or not any(result.trained):
        fault = result.fault
        raise InfrastructureError(
            f"episode {result.uid} {result.status}"
            + (f": {fault.owner}: {fault.kind}: {fault.message}" if fault else "")
        )
    if any(trajectory.path_start.any() for trajectory in result.trajectories):
        raise ConfigError("verl's engines cannot train parallel paths: use turnwise-grpo-trainer")


def count_turns(trajectory: Trajectory) -> int:
    """
    Return the number of turns as verl's agent loops count them: user turns + assistant turns + 1, for the prompt.

    An assistant turn is a run of sampled tokens, and a user turn is what came between two of them or at the end, also
    from several tools at once. A single answer has 2, and one with a round of tools before it 4. turnwise's own
    `EpisodeMetrics.num_turns` counts assistant turns only.
    """
    mask = np.asarray(trajectory.response_mask)
    return 1 + (int((mask[1:] != mask[:-1]).sum()) + 1 if len(mask) else 0)


def to_loop_outputs(result: EpisodeResult) -> list[Any]:
    """
    Return an `AgentLoopOutput` for each trajectory of an episode; the last one has the reward.

    `extra_fields["turnwise_columns"]` has the open columns by name: (n, *shape) of all tokens, or of the response. verl
    pads none of its extra fields.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    check_trainable(result)
    metrics = result.metrics
    timing = AgentLoopMetrics(
        generate_sequences=metrics.llm_s, tool_calls=metrics.tool_s, compute_score=metrics.reward_s
    )
    outputs = [
        AgentLoopOutput(
            prompt_ids=trajectory.prompt_ids.tolist(),
            response_ids=trajectory.response_ids.tolist(),
            response_mask=trajectory.response_mask.tolist(),
            response_logprobs=trajectory.logprobs.tolist(),
            num_turns=count_turns(trajectory),
            metrics=timing,
            extra_fields={**_weight_steps(trajectory), **_loop_columns(trajectory)},
            **_routes(trajectory),
            **_images(trajectory),
        )
        for trajectory in _trained(result)
    ]
    if result.reward is not None:
        outputs[-1].reward_score = result.reward
        outputs[-1].extra_fields["reward_extra_info"] = _reward_extra(result)
    return outputs


def _trained(result: EpisodeResult) -> list[Trajectory]:
    """Return the trained trajectories, each with the open columns of all of them: verl's rows have the same fields."""
    trained = list(compress(result.trajectories, result.trained))
    specs = {name: spec for each in trained for name, spec in each.columns.items()}
    for index, record in enumerate(trained):
        for spec in (spec for name, spec in specs.items() if name not in record.columns):
            size = record.num_response_tokens if spec.of_responses else len(record)
            trained[index] = trained[index].with_column(spec, spec.filled(size))
    return trained


def _loop_columns(trajectory: Trajectory) -> dict[str, Any]:
    """Return the open columns under one key: verl makes an array of each extra field, for which a dict is one value."""
    found = {name: np.array(trajectory.column(name)) for name in trajectory.columns if name != COLUMN}
    return {"turnwise_columns": found} if found else {}


def _images(trajectory: Trajectory) -> dict[str, Any]:
    """Return the images of a record, of which verl's loop worker computes the inputs and the positions."""
    return {"multi_modal_data": {"images": images_of(trajectory.pictures)}} if trajectory.pictures else {}


def _need_vision(trajectory: Trajectory, vision: VisionRows | None) -> None:
    if trajectory.pictures and vision is None:
        raise ConfigError("a record has pictures, and verl's model is neither a Qwen2.5-VL nor a Qwen3-VL")


def to_queue_rows(batch: RolloutBatch, result: EpisodeResult, vision: VisionRows | None = None) -> list[dict[str, Any]]:
    """
    Return the fields of an episode's TransferQueue rows: unpadded tensors with token-level rewards.

    With several rows, the last one has the reward of the whole episode and the others have none: verl's group baselines
    use the last output of an episode for all of its rows.

    Args:
        batch: the batch of this episode alone.
        result: the episode.
        vision: of a vision-language model, whose rows have positions on four axes, also rows of text.
    """
    import torch

    check_trainable(result)
    rewards = batch.rm_scores
    if len(batch) > 1:
        last, end = batch.rm_scores[-1], max(int(batch.response_lens[-1]) - 1, 0)
        rewards = torch.zeros_like(batch.rm_scores)
        rewards[-1] = last
        rewards[-1, end] += batch.episode_rewards[-1] - last.sum()
    rows = []
    for index, trajectory in enumerate(_trained(result)):
        prompts, responses = torch.tensor(trajectory.prompt_ids), torch.tensor(trajectory.response_ids)
        mask = torch.tensor(trajectory.response_mask, dtype=torch.int64)
        _need_vision(trajectory, vision)
        positions = torch.tensor(trajectory.position_ids).long() if vision is None else vision.positions(trajectory)
        rows.append(
            _join(
                {
                    "prompts": prompts.long(),
                    "responses": responses.long(),
                    "response_mask": mask,
                    "loss_mask": mask,
                    "input_ids": torch.cat([prompts, responses]).long(),
                    "position_ids": positions,
                    "rollout_log_probs": torch.tensor(trajectory.logprobs, dtype=torch.float32),
                    "rm_scores": rewards[index, : len(responses)].clone(),
                    "num_turns": count_turns(trajectory),
                    "extra_fields": {**_weight_steps(trajectory), "reward_extra_info": _reward_extra(result)},
                    "multi_modal_inputs": {} if vision is None else vision.inputs(trajectory),
                },
                {name: torch.from_numpy(np.array(trajectory.column(name))) for name in trajectory.columns}
                | {name: torch.from_numpy(values) for name, values in _routes(trajectory).items()},
            )
        )
    return rows


def _join(own: dict[str, Any], fields: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a row, and the open columns; `ConfigError` for a column that has a name of verl's."""
    if taken := sorted(own.keys() & fields.keys()):
        raise ConfigError(f"the column or field {taken[0]!r} has a name of verl's rows: choose another")
    return own | dict(fields)


def to_data_proto(batch: RolloutBatch, results: Sequence[EpisodeResult], vision: VisionRows | None = None) -> Any:
    """
    Return a batch as verl's `DataProto` with one row per result, in order.

    Args:
        batch: padded to verl's prompt and response length.
        results: the episodes, with one trajectory each.
        vision: of a vision-language model, whose rows have positions on four axes, also rows of text.

    Raises:
        InfrastructureError: an episode failed.
        ConfigError: an episode has several trajectories or parallel paths.
    """
    from tensordict import TensorDict
    from verl import DataProto

    for result in results:
        check_trainable(result)
        if sum(result.trained) != 1:
            raise ConfigError(
                f"agent {result.agent_name!r} made {sum(result.trained)} trajectories; verl V0 expects 1: use V1"
            )
    batch = batch.as_int64()  # verl pads, concatenates and indexes with ids and masks of this type
    tensors = {
        "prompts": batch.prompts,
        "responses": batch.responses,
        "response_mask": batch.response_mask,
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
        "rollout_log_probs": batch.rollout_log_probs,
    }
    tensors = _join(tensors, batch.fields)
    trained = [next(compress(result.trajectories, result.trained)) for result in results]
    if COLUMN in tensors:
        for trajectory in trained:
            _routes(trajectory)  # raises for a route that verl needs and that is not known
        tensors[COLUMN] = tensors[COLUMN].clamp(min=0)
    if bool(batch.scored.all()):
        tensors["rm_scores"] = batch.rm_scores
    columns: dict[str, object] = {"__num_turns__": np.array([count_turns(each) for each in trained], np.int32)}
    for trajectory in trained:
        _need_vision(trajectory, vision)
    if vision is not None:
        tensors["position_ids"] = vision.padded_positions(trained, batch.attention_mask)
        columns["multi_modal_inputs"] = np.array([vision.inputs(each) for each in trained], dtype=object)
    extras = [_reward_extra(result) for result in results]
    names = sorted({name for extra in extras for name in extra})
    for name in names:
        columns[name] = np.array([extra.get(name, np.nan) for extra in extras])
    for name in ("min_global_steps", "max_global_steps"):
        columns[name] = np.array([_weight_steps(each)[name] for each in trained], dtype=object)
    meta = {"timing": batch_timing(results)} | ({"reward_extra_keys": names} if "rm_scores" in tensors else {})
    return DataProto(batch=TensorDict(tensors, batch_size=len(results)), non_tensor_batch=columns, meta_info=meta)


def _routes(trajectory: Trajectory) -> dict[str, Any]:
    """
    Return `routed_experts`, (n, layers, top_k) of all tokens, as verl has them; nothing for a record without.

    verl has no word for an unknown route: what no server has run, the last token and what follows it, and layers
    without experts have the expert 0.

    Raises:
        ConfigError: a token before the last sampled one has no route, so verl would replay the wrong experts.
    """
    if COLUMN not in trajectory.columns:
        return {}
    values: NDArray[np.int16] = np.asarray(trajectory.column(COLUMN), np.int16)
    sampled = np.flatnonzero(trajectory.response_mask)
    end = trajectory.num_prompt_tokens + (int(sampled[-1]) if len(sampled) else 0)
    missing = np.flatnonzero((values[:end] < 0).all((1, 2)))
    if len(missing):
        raise ConfigError(
            f"token {int(missing[0])} of a record has no routed experts, and verl replays those of all tokens: its"
            " servers must return them for whole contexts"
        )
    return {COLUMN: np.maximum(values, 0)}


def _weight_steps(trajectory: Trajectory) -> dict[str, Any]:
    """Return the first and last training step whose weights sampled the trajectory, under verl's names."""
    sampled = np.asarray(trajectory.weight_versions)[np.asarray(trajectory.response_mask) == 1]
    known = len(sampled) > 0
    return {
        "min_global_steps": int(sampled.min()) if known else None,
        "max_global_steps": int(sampled.max()) if known else None,
    }


def _reward_extra(result: EpisodeResult) -> dict[str, float]:
    found: dict[str, float] = {}
    for score in result.scores:
        found.update(score.extra)
    return found
