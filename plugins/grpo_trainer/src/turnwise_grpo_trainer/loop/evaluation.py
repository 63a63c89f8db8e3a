"""Evaluation results of held-out tasks: as JSON, as a table, and as notes below it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from attrs import asdict
from rich.markup import escape
from rich.table import Table

from turnwise import EpisodeResult, Status
from turnwise.errors import DataError
from turnwise_grpo_trainer.report.episode_metrics import compute_episode_metrics
from turnwise_grpo_trainer.report.pass_at_k import Estimate, bootstrap, pass_at_k

ALL: Final = "all"
FEW_TASKS: Final = 20
"""With fewer tasks, a bootstrap interval is too narrow; see `bootstrap`."""


def usable_reward(episode: EpisodeResult) -> float | None:
    """Return the reward; None for an unscored episode and for a failed one, which is no evidence about the policy."""
    return None if episode.status is Status.FAILED else episode.reward


def rewards_by_source(episodes: Sequence[EpisodeResult]) -> dict[str, dict[str, list[float]]]:
    """
    Return the usable rewards of each task by data source, and of all tasks under `all`.

    A task without usable rewards has an empty list. A single data source is not listed, because it equals `all`.
    """
    sources: dict[str, dict[str, list[float]]] = {ALL: {}}
    for episode in episodes:
        reward = usable_reward(episode)
        for source in dict.fromkeys((ALL, episode.task.data_source or "(no source)")):
            rewards = sources.setdefault(source, {}).setdefault(episode.task.uid, [])
            if reward is not None:
                rewards.append(reward)
    return sources if len(sources) > 2 else {ALL: sources[ALL]}


def evaluate_episodes(
    episodes: Sequence[EpisodeResult], *, n: int, ks: Sequence[int], threshold: float, seed: int = 0
) -> dict[str, Any]:
    """
    Return the results of an evaluation.

    Args:
        episodes: n of each task; failed and unscored ones are counted and excluded.
        n: requested episodes per task.
        ks: values of k for pass@k, which covers the tasks with at least k usable rewards.
        threshold: least reward of a solved episode.
        seed: of the bootstrap.

    Returns:
        JSON values. `episodes`, `failed` and, by status, `unscored_episodes`; `tasks`, `unscored_tasks` without a
        usable reward, `short_tasks` with fewer than n; `samples_per_task`, which is n; `threshold`; `numbers`, the
        metrics of the episodes; and `results` by data source and for `all`: `mean@n` (mean reward), `solved@n` (share
        of solved episodes) and `pass@k`. Each has the number of included `tasks` and of `left_out` ones, and `value`,
        `low` and `high`: None without a task, and the last two None for one task.

    Raises:
        DataError: no episode has a usable reward.
    """
    sources = rewards_by_source(episodes)
    tasks = sources[ALL].values()
    if not any(tasks):
        raise DataError(f"none of the {len(episodes)} episodes was scored, so there is nothing to evaluate")
    return {
        "episodes": len(episodes),
        "failed": sum(episode.status is Status.FAILED for episode in episodes),
        "unscored_episodes": dict(Counter(str(each.status) for each in episodes if usable_reward(each) is None)),
        "tasks": len(tasks),
        "unscored_tasks": sum(not each for each in tasks),
        "short_tasks": sum(0 < len(each) < n for each in tasks),
        "samples_per_task": n,
        "threshold": threshold,
        "numbers": compute_episode_metrics(episodes),
        "results": {name: _results(each.values(), n, ks, threshold, seed) for name, each in sources.items()},
    }


def _results(
    tasks: Collection[Sequence[float]], n: int, ks: Sequence[int], threshold: float, seed: int
) -> dict[str, Any]:
    solved = [[reward >= threshold for reward in each] for each in tasks]
    values = {
        f"mean@{n}": [sum(each) / len(each) for each in tasks if each],
        f"solved@{n}": [sum(each) / len(each) for each in solved if each],
    }
    for k in ks:
        values[f"pass@{k}"] = [pass_at_k(len(each), sum(each), k) for each in solved if len(each) >= k]
    return {name: _figure(each, len(tasks), seed) for name, each in values.items()}


def _figure(values: Sequence[float], num_tasks: int, seed: int) -> dict[str, Any]:
    estimate = bootstrap(values, seed=seed) if values else Estimate(value=None, low=None, high=None)
    return {**asdict(estimate), "tasks": len(values), "left_out": num_tasks - len(values)}


def results_table(report: Mapping[str, Any]) -> Table:
    """Return the results for a terminal, with 95 % intervals."""
    table = Table(title=f"{report['tasks']} tasks, {report['samples_per_task']} samples each")
    names = list(report["results"][ALL])
    for heading in ("data source", *names):
        table.add_column(heading, justify="left" if heading == "data source" else "right")
    for source, results in report["results"].items():
        table.add_row(*map(escape, (source, *map(_cell, results.values()))))
    return table


def _cell(figure: Mapping[str, object]) -> str:
    if not figure["tasks"]:
        return "-"
    interval = "" if figure["low"] is None else f" [{figure['low']:.3f}, {figure['high']:.3f}]"
    return f"{figure['value']:.3f}{interval}"


def exclusion_notes(report: Mapping[str, Any]) -> list[str]:
    """Return notes for below the table, one per line: excluded episodes and tasks, and intervals to distrust."""
    num_tasks, n, results = report["tasks"], report["samples_per_task"], report["results"]
    lines = []
    if statuses := report["unscored_episodes"]:
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        lines.append(f"{sum(statuses.values())} of {report['episodes']} episodes have no score: {counts}")
    if unscored := report["unscored_tasks"]:
        lines.append(f"{unscored} of {num_tasks} tasks have no scored sample and are left out")
    if short := report["short_tasks"]:
        lines.append(
            f"{short} of {num_tasks} tasks have 1 to {n - 1} scored samples: mean@{n} and solved@{n} use these"
        )
    for name, figure in results[ALL].items():
        if figure["left_out"] > unscored:
            lines.append(
                f"{name} leaves out {figure['left_out']} of {num_tasks} tasks, which have fewer scored samples"
            )
    if any(0 < figure["tasks"] < FEW_TASKS for each in results.values() for figure in each.values()):
        lines.append(f"intervals over fewer than {FEW_TASKS} tasks are too narrow; a single task has none")
    return lines
