"""Summary of a run: counts, rewards, tokens and times of the finished episodes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from turnwise.files import write_text
from turnwise.record.columns import Origin
from turnwise.record.result import EpisodeResult
from turnwise.types import EpisodeMetrics, JsonDict, JsonObject, Status


def summarize(results: Sequence[EpisodeResult], wall_s: float | None) -> JsonDict:
    """
    Summarise finished episodes.

    Args:
        results: episodes; none gives zeros and None.
        wall_s: seconds that the run took, by the clock, in all its parts; None when that is not known.

    Returns:
        JSON values only. Spreads are ``{"min", "mean", "max"}``, None without values.

        - `episodes`, `wall_s`, `status` (number of episodes by status).
        - `limits`: number of episodes by the limit that ended them, see `turnwise.record.limit.ReachedLimit`.
        - `reward`: spread over the episodes that were scored, and how many (`scored`).
        - `groups`: how many tasks (`count`), most episodes of one (`n`), and over the tasks with a scored episode the
          mean of their mean reward (`mean@n`) and of their best (`best@n`).
        - `num_turns`: spread; `num_tool_calls`, `num_tool_errors`: sums.
        - `num_tokens`: by origin, counted in the records, with `replayed` if there are such tokens; `mask_ratio`:
          action over response tokens.
        - `extra`: `sum` and, over all episodes, `mean` of each metric that an episode recorded, by name.
        - `action_tokens_per_s`, `episodes_per_s`: over `wall_s`.
        - `total_s`, `llm_s`, `tool_s`: spreads over the episodes; `slowest`: uid of the one with the largest `total_s`.
    """
    metrics = [result.metrics for result in results]
    num_tokens = _num_tokens(results)
    response_tokens = sum(num_tokens.values()) - num_tokens["prompt"]
    slowest = max(results, key=lambda result: result.metrics.total_s, default=None)
    rewards = [result.reward for result in results if result.reward is not None]
    return {
        "episodes": len(results),
        "wall_s": wall_s,
        "status": {str(status): sum(result.status is status for result in results) for status in Status},
        "limits": dict(Counter(result.limit.name for result in results if result.limit).most_common()),
        "reward": {"scored": len(rewards), **_spread(rewards)},
        "groups": _groups(results),
        "num_turns": _spread([m.num_turns for m in metrics]),
        "num_tool_calls": sum(m.num_tool_calls for m in metrics),
        "num_tool_errors": sum(m.num_tool_errors for m in metrics),
        "num_tokens": num_tokens,
        "mask_ratio": num_tokens["action"] / response_tokens if response_tokens else None,
        "extra": _extra(metrics),
        "action_tokens_per_s": num_tokens["action"] / wall_s if wall_s else None,
        "episodes_per_s": len(results) / wall_s if wall_s else None,
        "total_s": _spread([m.total_s for m in metrics]),
        "llm_s": _spread([m.llm_s for m in metrics]),
        "tool_s": _spread([m.tool_s for m in metrics]),
        "slowest": None if slowest is None else slowest.uid,
    }


def note_truncations(results: Sequence[EpisodeResult]) -> str:
    """Return a sentence that names the limits if most episodes were truncated, else an empty text."""
    limits = [result.limit for result in results if result.status is Status.TRUNCATED]
    if 2 * len(limits) <= len(results):
        return ""
    counts = Counter("an unknown limit" if limit is None else limit.name for limit in limits)
    values = {name: {limit.value for limit in limits if limit and limit.name == name} for name in counts}
    shown = [
        f"{count} by {name}{f' of {next(iter(values[name]))}' if len(values[name] - {None}) == 1 else ''}"
        for name, count in counts.most_common()
    ]
    text = f"{len(limits)} of {len(results)} episodes were truncated: {', '.join(shown)}"
    return f"{text}; raise {'it' if len(shown) == 1 else 'these limits'} if they should end by themselves"


def write_metrics(path: str | Path, summary: JsonObject) -> None:
    """Write a summary as JSON, whole or not at all; numbers that JSON has not, such as nan, become null."""
    write_text(path, json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"min": None, "mean": None, "max": None}
    return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}


def _extra(metrics: Sequence[EpisodeMetrics]) -> dict[str, dict[str, float]]:
    sums: dict[str, float] = {}
    for each in metrics:
        for name, value in each.extra.items():
            sums[name] = sums.get(name, 0.0) + value
    # An episode without the metric counts as 0: it recorded no event of this kind.
    return {name: {"sum": sums[name], "mean": sums[name] / len(metrics)} for name in sorted(sums)}


def _groups(results: Sequence[EpisodeResult]) -> JsonDict:
    sizes = Counter(_group(result) for result in results)
    rewards: dict[object, list[float]] = {}
    for result in results:
        if result.reward is not None:
            rewards.setdefault(_group(result), []).append(result.reward)
    return {
        "count": len(sizes),
        "n": max(sizes.values(), default=0),
        "mean@n": _spread([sum(values) / len(values) for values in rewards.values()])["mean"],
        "best@n": _spread([max(values) for values in rewards.values()])["mean"],
    }


def _group(result: EpisodeResult) -> tuple[str, int, bool]:
    return result.task.uid, result.global_step, result.validation


def _num_tokens(results: Sequence[EpisodeResult]) -> dict[str, int]:
    counts = np.zeros(len(Origin), np.int64)
    for result in results:
        for trajectory in result.trajectories:
            counts += np.bincount(trajectory.origins, minlength=len(Origin))
            counts[Origin.PROMPT] += trajectory.num_prompt_tokens
    return {
        o.name.lower(): int(counts[o]) for o in Origin if counts[o] or o not in (Origin.REPLAYED, Origin.CONSTRAINED)
    }


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
