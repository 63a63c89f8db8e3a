"""Progress of a run: a bar on a terminal, an occasional log line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Protocol, Self

import structlog
from attrs import define, field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from turnwise.events.observer import Observer, TurnFinished
from turnwise.record.result import EpisodeResult
from turnwise.types import Status

_LOG_EVERY_S: Final = 5.0


@define
class Tally(Observer):
    """Counts the progress of a run; an observer, so that tokens count before their episode ends."""

    num_tokens: int = 0
    num_finished_tokens: int = 0
    num_episodes: int = 0
    num_tool_calls: int = 0
    num_failed: int = 0
    started: float = field(factory=time.perf_counter)

    def on_turn_finished(self, event: TurnFinished) -> None:
        self.num_tokens += event.num_new_tokens

    def on_episode_finished(self, event: EpisodeResult) -> None:
        """Count an episode, its tool calls, and whether it failed; and its tokens when turns are not heard here."""
        self.num_episodes += 1
        self.num_finished_tokens += event.metrics.num_tokens.get("action", 0)
        self.num_tool_calls += event.metrics.num_tool_calls
        self.num_failed += event.status is Status.FAILED

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second since the start."""
        num_tokens = max(self.num_tokens, self.num_finished_tokens)
        return num_tokens / max(time.perf_counter() - self.started, 1e-9)


class ProgressView(Protocol):
    """Shows a tally; a context manager."""

    def __enter__(self) -> Self:
        """Start to draw."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop."""

    def update(self) -> None:
        """Show the tally as it is."""


def progress_view(tally: Tally, total: int, console: Console) -> ProgressView:
    """Return a bar for a terminal and log lines for anything else."""
    return BarView(tally, total, console) if console.is_terminal else LogView(tally, total)


class BarView:
    """A live bar on standard error."""

    def __init__(self, tally: Tally, total: int, console: Console) -> None:
        self._tally = tally
        self._progress = Progress(
            TextColumn("episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TextColumn("{task.fields[calls]} tool calls"),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=False,
        )
        self._task = self._progress.add_task("", total=total, rate=0.0, calls=0, failed=0)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, traceback)

    def update(self) -> None:
        tally = self._tally
        self._progress.update(
            self._task,
            completed=tally.num_episodes,
            rate=tally.tokens_per_s,
            calls=tally.num_tool_calls,
            failed=tally.num_failed,
        )


class LogView:
    """A log line every few seconds, and one at the end."""

    def __init__(self, tally: Tally, total: int) -> None:
        self._tally = tally
        self._total = total
        self._logged = time.perf_counter()

    def __enter__(self) -> Self:
        structlog.get_logger().info("rollout started", episodes=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._log("rollout ended")

    def update(self) -> None:
        if time.perf_counter() - self._logged >= _LOG_EVERY_S:
            self._log("rollout running")

    def _log(self, text: str) -> None:
        tally = self._tally
        self._logged = time.perf_counter()
        structlog.get_logger().info(
            text,
            episodes=f"{tally.num_episodes}/{self._total}",
            tokens_per_s=round(tally.tokens_per_s),
            tool_calls=tally.num_tool_calls,
            failed=tally.num_failed,
        )
