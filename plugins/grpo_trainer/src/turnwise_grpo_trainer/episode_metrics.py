"""Numbers of a batch of episodes, by the names that the logs have."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise import EpisodeResult, Status
from turnwise.errors import EngineError


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def episode_numbers(episodes: Sequence[EpisodeResult]) -> dict[str, float]:
    """
    Return what the episodes of a batch come to.

    Returns:
        `reward/mean`, and `reward/std` over scored episodes; `length/mean` and `length/max` of responses in tokens;
        `tokens/action` sampled ones; `turns/mean`; `tools/per_episode`, `tools/share` of the episodes with a call and
        `tools/errors` per episode; `status/...` shares.
    """
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    mean = _mean(rewards)
    lengths = [sum(record.num_response_tokens for record in episode.trajectories) for episode in episodes]
    metrics = [episode.metrics for episode in episodes]
    numbers = {
        "reward/mean": mean,
        "reward/std": _mean([(reward - mean) ** 2 for reward in rewards]) ** 0.5,
        "reward/scored": len(rewards) / max(len(episodes), 1),
        "length/mean": _mean(lengths),
        "length/max": float(max(lengths, default=0)),
        "tokens/action": float(sum(each.num_tokens.get("action", 0) for each in metrics)),
        "turns/mean": _mean([each.num_turns for each in metrics]),
        "tools/per_episode": _mean([each.num_tool_calls for each in metrics]),
        "tools/share": _mean([float(each.num_tool_calls > 0) for each in metrics]),
        "tools/errors": _mean([each.num_tool_errors for each in metrics]),
    }
    for status in ("completed", "truncated", "timed_out", "aborted", "failed"):
        numbers[f"status/{status}"] = _mean([float(episode.status == status) for episode in episodes])
    return numbers


def refuse_all_failed(episodes: Sequence[EpisodeResult]) -> None:
    """Raise `EngineError` with the first cause when no episode says anything about the policy."""
    if not episodes or any(episode.status is not Status.FAILED for episode in episodes):
        return
    fault = episodes[0].fault
    reason = f"{fault.owner}: {fault.kind}: {fault.message}" if fault else "unknown"
    raise EngineError(f"all {len(episodes)} episodes failed, the first by {reason}")
