"""Metrics of a batch of episodes, under the names that the logs use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import stdev

from turnwise import EpisodeResult, Status
from turnwise.errors import EngineError


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def compute_episode_metrics(episodes: Sequence[EpisodeResult]) -> dict[str, float]:
    """
    Return the metrics of a batch of episodes.

    Returns:
        `reward/mean` and `reward/std` over scored episodes, and `reward/scored`, their share; `reward/stderr`, the
        standard error of the mean over tasks, with two tasks or more; `length/mean` and `length/max` of responses in
        tokens; `tokens/action`, the number of sampled tokens; `records/untrained`, the
        number of records without rows; `turns/mean`;
        `tools/per_episode`, `tools/share` of episodes with a call, and `tools/errors` per episode; the shares
        `status/completed`, `status/truncated` and so on; `limit/NAME`, the share that a limit truncated;
        `groups/varied`, the share of the groups with two scored episodes or more whose rewards differ. With tasks of
        several data sources, also `source/NAME/share`
        of the episodes and `source/NAME/reward`, the mean of the scored ones.
    """
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    mean = _mean(rewards)
    lengths = [sum(record.num_response_tokens for record in episode.trajectories) for episode in episodes]
    metrics = [episode.metrics for episode in episodes]
    found = {
        "reward/mean": mean,
        "reward/std": _mean([(reward - mean) ** 2 for reward in rewards]) ** 0.5,
        "reward/scored": len(rewards) / max(len(episodes), 1),
        "length/mean": _mean(lengths),
        "length/max": float(max(lengths, default=0)),
        "tokens/action": float(sum(each.num_tokens.get("action", 0) for each in metrics)),
        "records/untrained": float(sum(not trained for episode in episodes for trained in episode.trained)),
        "turns/mean": _mean([each.num_turns for each in metrics]),
        "tools/per_episode": _mean([each.num_tool_calls for each in metrics]),
        "tools/share": _mean([float(each.num_tool_calls > 0) for each in metrics]),
        "tools/errors": _mean([each.num_tool_errors for each in metrics]),
    }
    by_task = task_rewards(episodes)
    if len(by_task) > 1:
        found["reward/stderr"] = stdev(map(_mean, by_task)) / len(by_task) ** 0.5
    for status in ("completed", "truncated", "timed_out", "aborted", "failed"):
        found[f"status/{status}"] = _mean([float(episode.status == status) for episode in episodes])
    cut = Counter(episode.limit.name for episode in episodes if episode.limit and episode.status == Status.TRUNCATED)
    found |= {f"limit/{name}": count / len(episodes) for name, count in cut.items()}
    groups = [rewards for rewards in _group_rewards(episodes) if len(rewards) > 1]
    if groups:
        found["groups/varied"] = _mean([float(min(rewards) != max(rewards)) for rewards in groups])
    return found | _source_metrics(episodes)


def _group_rewards(episodes: Sequence[EpisodeResult]) -> list[list[float]]:
    """Return the rewards of each group with a scored episode; a task may have a group in each step."""
    rewards: dict[object, list[float]] = {}
    for episode in episodes:
        if episode.reward is not None:
            rewards.setdefault((episode.task.uid, episode.global_step), []).append(episode.reward)
    return list(rewards.values())


def _source_metrics(episodes: Sequence[EpisodeResult]) -> dict[str, float]:
    """Return mean reward and share of each `data_source`, if there is more than one."""
    sources: dict[str, list[EpisodeResult]] = {}
    for episode in episodes:
        sources.setdefault(episode.task.data_source or "unnamed", []).append(episode)
    if len(sources) < 2:
        return {}
    found = {f"source/{name}/share": len(each) / len(episodes) for name, each in sources.items()}
    rewards = {name: [each.reward for each in part if each.reward is not None] for name, part in sources.items()}
    return found | {f"source/{name}/reward": _mean(values) for name, values in rewards.items() if values}


def task_rewards(episodes: Sequence[EpisodeResult]) -> list[list[float]]:
    """
    Return the rewards of each task with a scored episode.

    Episodes of one task are not independent, so an error of the mean counts tasks.
    """
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        if episode.reward is not None:
            rewards.setdefault(episode.task.uid, []).append(episode.reward)
    return list(rewards.values())


def check_not_all_failed(episodes: Sequence[EpisodeResult]) -> None:
    """Raise `EngineError` with the first cause if every episode failed."""
    if not episodes or any(episode.status is not Status.FAILED for episode in episodes):
        return
    fault = episodes[0].fault
    reason = f"{fault.owner}: {fault.kind}: {fault.message}" if fault else "unknown"
    raise EngineError(f"all {len(episodes)} episodes failed; first failure: {reason}")
