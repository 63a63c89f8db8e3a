"""Episode times under the names of verl's `AgentLoopManager`."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise import EpisodeResult


def batch_timing(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """
    Return the times of a batch as verl logs them; an empty batch has none.

    ``agent_loop/generate_sequences/min``, ``max`` and ``mean`` are the seconds that an episode waited for the model,
    ``agent_loop/tool_calls/...`` for tools (parallel calls add up) and ``agent_loop/compute_score/...`` for its reward.
    ``agent_loop/slowest/...`` has the three times of the episode with the largest sum of them, and `prompt_length` and
    `response_length` in tokens over all its trajectories.
    """
    if not results:
        return {}
    seconds = {
        "generate_sequences": [result.metrics.llm_s for result in results],
        "tool_calls": [result.metrics.tool_s for result in results],
        "compute_score": [result.metrics.reward_s for result in results],
    }
    totals = [sum(times) for times in zip(*seconds.values(), strict=True)]
    slowest = totals.index(max(totals))
    timing: dict[str, float] = {}
    for name, values in seconds.items():
        timing[f"agent_loop/{name}/min"] = min(values)
        timing[f"agent_loop/{name}/max"] = max(values)
        timing[f"agent_loop/{name}/mean"] = sum(values) / len(values)
        timing[f"agent_loop/slowest/{name}"] = values[slowest]
    trajectories = results[slowest].trajectories
    timing["agent_loop/slowest/prompt_length"] = float(sum(each.num_prompt_tokens for each in trajectories))
    timing["agent_loop/slowest/response_length"] = float(sum(each.num_response_tokens for each in trajectories))
    return timing
