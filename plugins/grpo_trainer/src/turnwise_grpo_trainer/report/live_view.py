"""Shows the progress of a training: a live table on a terminal, log lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import structlog
from attrs import define, field
from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from turnwise import EpisodeResult, Observer
from turnwise.console import Console
from turnwise.events.observer import RunWaiting

COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    "reward/mean": ("reward", "{:.3f}"),
    "length/mean": ("length", "{:.0f}"),
    "tools/per_episode": ("tools", "{:.2f}"),
    "tokens/per_s": ("tokens/s", "{:.0f}"),
    "gap/max": ("gap", "{:.1e}"),
    "actor/grad_norm": ("grad", "{:.3f}"),
    "actor/kl": ("kl", "{:.4f}"),
    "policy/nats": ("nats", "{:.3f}"),
    "noise/scale": ("noise", "{:.0f}"),
    "seconds/rollout": ("rollout s", "{:.2f}"),
    "seconds/update": ("update s", "{:.2f}"),
    "seconds/sync": ("sync s", "{:.3f}"),
    "seconds/step": ("step s", "{:.2f}"),
}
"""Metrics that are shown, with their headings and formats."""

_SHOWN_STEPS: Final = 12


@define(eq=False)
class TrainView(Observer):
    """
    Shows steps and validations, and the parts that the training waits for; a context manager.

    Attributes:
        num_steps: steps of the training.
        episodes_per_step: episodes of a step, the total of the progress bar.
        console: where to print.
    """

    num_steps: int
    episodes_per_step: int
    console: Console
    _lines: list[tuple[str, ...]] = field(factory=list, init=False)
    _warnings: list[str] = field(factory=list, init=False)
    _waits: str = field(default="", init=False)
    _live: Live | None = field(default=None, init=False)
    _progress: Progress = field(init=False)
    _steps: TaskID = field(init=False)
    _rollout: TaskID = field(init=False)
    _seen: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console)
        self._steps = self._progress.add_task("steps", total=self.num_steps)
        self._rollout = self._progress.add_task("episodes", total=self.episodes_per_step)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self._table(), console=self.console, refresh_per_second=4, transient=False)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)

    def on_run_waiting(self, event: RunWaiting) -> None:
        self._waits = "; ".join(map(str, event.waits))
        self._show(None)

    def episode(self, episode: EpisodeResult) -> None:
        """Count a finished episode."""
        self._seen += 1
        self._progress.update(self._rollout, completed=self._seen)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        self._seen = 0
        self._progress.update(self._steps, completed=step)
        self._progress.update(self._rollout, completed=0)
        cells = {name: _cell(form, metrics[name]) for name, (_, form) in COLUMNS.items() if name in metrics}
        cells = {name: cell for name, cell in cells.items() if cell}
        self._lines.append((str(step), *(cells.get(name, "") for name in COLUMNS)))
        self._show("step", step=step, **{COLUMNS[name][0].replace(" ", "_"): cell for name, cell in cells.items()})

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a validation."""
        reward = f"{metrics['validation/reward/mean']:.3f}"
        self._lines.append((f"{step} held out", reward, *("" for _ in range(len(COLUMNS) - 1))))
        ends = [metrics.get(f"validation/reward/{end}") for end in ("low", "high")]
        interval = ", ".join(f"{end:.3f}" for end in ends if end is not None)
        seconds = f"{metrics['validation/seconds']:.1f}"
        self._show("validation", step=step, reward=reward, interval=interval or "-", seconds=seconds)

    def warning(self, text: str) -> None:
        """Log a warning; on a terminal it stays below the table, too."""
        structlog.get_logger().warning(text)
        self._warnings.append(text)
        self._show(None)

    @contextmanager
    def activity(self, description: str) -> Iterator[None]:
        """Show another activity than the rollout during the body."""
        self._progress.update(self._rollout, description=description)
        self._show(None)
        yield
        self._progress.update(self._rollout, description="episodes")

    def _show(self, event: str | None, **values: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
        elif event is not None:
            structlog.get_logger().info(event, **values)

    def _table(self) -> Group:
        table = Table()
        for heading in ("step", *(heading for heading, _ in COLUMNS.values())):
            table.add_column(heading, justify="right")
        for line in self._lines[-_SHOWN_STEPS:]:
            table.add_row(*line)
        notes = [f"warning: {text}" for text in self._warnings]
        notes += [f"waits for {self._waits}"] if self._waits else []
        return Group(table, *(Text(text, style="yellow") for text in notes), self._progress)


def _cell(form: str, value: float) -> str:
    """Return a number as text: none for one that was not measured, and no sign before a rounded 0."""
    if math.isnan(value):
        return ""
    text = form.format(value)
    return text.lstrip("-") if float(text) == 0 else text
