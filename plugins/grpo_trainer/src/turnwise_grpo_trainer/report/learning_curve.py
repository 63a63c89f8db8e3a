"""The learning curve as a picture, and the table of held-out results before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from turnwise_grpo_trainer.report.held_out import Validations

_ROWS: Final = {
    "reward/mean": "reward",
    "length/mean": "response tokens",
    "turns/mean": "turns",
    "tools/per_episode": "tool calls",
    "tools/errors": "tool errors",
    "status/truncated": "truncated",
}


def draw_curve(metrics: Sequence[Mapping[str, object]], path: Path, *, title: str = "") -> None:
    """
    Draw reward, response length and log-probability gap over the steps.

    Args:
        metrics: lines of `metrics.jsonl`, from steps and validations.
        path: a file name that ends in .png.
        title: title of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    _plot(axes[0], metrics, "reward/mean", label="training batch", alpha=0.6)
    _plot(axes[0], metrics, "validation/reward/mean", label="held out", marker="o")
    held_out = [line for line in metrics if line.get("validation/reward/low") is not None]
    if held_out:
        ends = [[line[f"validation/reward/{end}"] for line in held_out] for end in ("low", "high")]
        axes[0].fill_between([line["step"] for line in held_out], *ends, alpha=0.2, label="95 % interval")
    axes[0].set_ylabel("reward")
    _add_legend(axes[0])
    _plot(axes[1], metrics, "length/mean")
    axes[1].set_ylabel("response tokens")
    _plot(axes[2], metrics, "gap/max", label="largest")
    _plot(axes[2], metrics, "gap/mean", label="mean")
    if any(line.get("gap/max") for line in metrics):  # a logarithmic axis needs a positive value
        axes[2].set_yscale("log", nonpositive="clip")
    axes[2].set_ylabel("|trainer - rollout| log-probability")
    _add_legend(axes[2])
    axes[2].set_xlabel("step")
    figure.suptitle(title)
    figure.savefig(path, dpi=100)


def _plot(axes: Any, metrics: Sequence[Mapping[str, object]], name: str, **style: Any) -> None:
    points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)
    axes.grid(visible=True, alpha=0.3)


def _add_legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:  # matplotlib warns of a legend without entries
        axes.legend()


def compare_validations(validations: Validations, best: int | None = None) -> list[tuple[str, ...]]:
    """
    Return the validation metrics before and after the training, and at its best step if that is another one.

    Args:
        validations: metrics by step.
        best: step with the best held-out score.

    Returns:
        The headings, and then a row for each metric; nothing without a validation. The reward has its 95 % interval.
    """
    if not validations:
        return []
    columns = {"before": min(validations), "after": max(validations)}
    if best is not None and best not in columns.values():
        columns = {"before": columns["before"], f"best (step {best})": best, "after": columns["after"]}
    chosen = [validations[step] for step in columns.values()]
    return [
        ("", *columns),
        *(
            (label, *(_with_interval(each, name) for each in chosen))
            for name, label in _ROWS.items()
            if all(f"validation/{name}" in each for each in chosen)
        ),
    ]


def _with_interval(metrics: Mapping[str, float], name: str) -> str:
    value, low = f"{metrics[f'validation/{name}']:.3f}", metrics.get("validation/reward/low")
    if name != "reward/mean" or low is None:
        return value
    return f"{value} [{low:.3f}, {metrics['validation/reward/high']:.3f}]"


def as_table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Return headings and rows for a terminal."""
    table = Table(title="held-out tasks")
    for heading in rows[0]:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows[1:]:
        table.add_row(*map(escape, row))  # an interval has brackets, as markup does
    return table


def as_markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """Return headings and rows as Markdown; nothing without any."""
    if not rows:
        return ""
    (_, *headings), *cells = rows
    lines = [("held-out tasks", *headings), ("---",) * len(rows[0]), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
