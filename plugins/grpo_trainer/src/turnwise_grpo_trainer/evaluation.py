"""Held-out results as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from turnwise import EpisodeResult, Status
from turnwise.errors import DataError
from turnwise_grpo_trainer.numbers import episode_numbers
from turnwise_grpo_trainer.pass_at_k import Estimate, bootstrap, pass_at_k

ALL = "all"


def by_task(episodes: Sequence[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """Return the episodes of each task; those that failed say nothing about the policy and are left out."""
    tasks: dict[str, list[EpisodeResult]] = {}
    for episode in episodes:
        if episode.status is not Status.FAILED and episode.reward is not None:
            tasks.setdefault(episode.task.uid, []).append(episode)
    return tasks


def evaluated(
    episodes: Sequence[EpisodeResult], *, ks: Sequence[int], threshold: float, seed: int = 0
) -> dict[str, Any]:
    """
    Return what a validation came to.

    Args:
        episodes: n of each task.
        ks: for which k to give pass@k; those above the smallest number of samples of a task are refused.
        threshold: reward from which on an episode counts as right.
        seed: of the bootstrap.

    Returns:
        JSON values: `episodes`, `failed`, `tasks`, `samples_per_task`, `threshold`, `numbers` of the episodes, and
        `results` by data source and for `all`: `mean@n` (mean reward), `solved@n` (share that is right) and `pass@k`,
        each with `value`, `low` and `high`.

    Raises:
        DataError: no episode was scored, or a k is too large.
    """
    tasks = by_task(episodes)
    if not tasks:
        raise DataError("no episode was scored, so there is nothing to evaluate")
    smallest = min(map(len, tasks.values()))
    if wrong := [k for k in ks if k > smallest]:
        raise DataError(f"--k {wrong[0]}: a task has only {smallest} scored samples; raise rollout.validation_n")
    sources: dict[str, list[list[EpisodeResult]]] = {ALL: list(tasks.values())}
    for group in tasks.values():
        sources.setdefault(group[0].task.data_source or "(no source)", []).append(group)
    if len(sources) == 2:
        sources = {ALL: sources[ALL]}
    return {
        "episodes": len(episodes),
        "failed": sum(episode.status is Status.FAILED for episode in episodes),
        "tasks": len(tasks),
        "samples_per_task": smallest,
        "threshold": threshold,
        "numbers": episode_numbers(episodes),
        "results": {name: _results(groups, ks, threshold, seed, smallest) for name, groups in sources.items()},
    }


def _results(
    groups: Sequence[Sequence[EpisodeResult]], ks: Sequence[int], threshold: float, seed: int, smallest: int
) -> dict[str, Any]:
    rewards = [[episode.reward or 0.0 for episode in group] for group in groups]
    right = [[reward >= threshold for reward in each] for each in rewards]
    found = {
        f"mean@{smallest}": bootstrap([sum(each) / len(each) for each in rewards], seed=seed),
        f"solved@{smallest}": bootstrap([sum(each) / len(each) for each in right], seed=seed),
    }
    for k in ks:
        found[f"pass@{k}"] = bootstrap([pass_at_k(len(each), sum(each), k) for each in right], seed=seed)
    return {name: _plain(estimate) for name, estimate in found.items()}


def _plain(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def results_table(report: Mapping[str, Any]) -> Table:
    """Return the results for a terminal, with 95 % intervals."""
    table = Table(title=f"{report['tasks']} tasks, {report['samples_per_task']} samples each")
    names = list(report["results"][ALL])
    for heading in ("data source", *names):
        table.add_column(heading, justify="left" if heading == "data source" else "right")
    for source, results in report["results"].items():
        cells = [f"{each['value']:.3f} [{each['low']:.3f}, {each['high']:.3f}]" for each in results.values()]
        table.add_row(source, *(cell.replace("[", r"\[") for cell in cells))
    return table
