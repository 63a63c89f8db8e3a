"""Progress of a run: a bar on a terminal, an occasional log line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import structlog
from attrs import define, field
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from turnwise.console import Console
from turnwise.errors import PromptTooLongError
from turnwise.events.observer import Observer, RunWaiting, TurnFinished
from turnwise.record.result import EpisodeResult
from turnwise.types import Status

_LOG_EVERY_S: Final = 5.0


@define
class Tally(Observer):
    """
    Counts the progress of a run; an observer, so that tokens count before their episode ends.

    `waits` names the parts that the run waits for, while nothing happens.
    """

    num_tokens: int = 0
    num_finished_tokens: int = 0
    num_episodes: int = 0
    num_tool_calls: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    waits: str = ""
    started: float = field(factory=time.perf_counter)

    def on_turn_finished(self, event: TurnFinished) -> None:
        self.num_tokens += event.num_new_tokens

    def on_episode_finished(self, event: EpisodeResult) -> None:
        """Count an episode, its tool calls, and whether it failed; and its tokens when turns are not heard here."""
        self.num_episodes += 1
        self.num_finished_tokens += sum(event.metrics.num_tokens.get(name, 0) for name in ("action", "constrained"))
        self.num_tool_calls += event.metrics.num_tool_calls
        dropped = event.fault is not None and event.fault.kind == PromptTooLongError.__name__
        self.num_dropped += dropped
        self.num_failed += event.status is Status.FAILED and not dropped

    def on_run_waiting(self, event: RunWaiting) -> None:
        shown = "; ".join(map(str, event.waits[:2]))
        more = f"; {len(event.waits) - 2} more" if len(event.waits) > 2 else ""
        self.waits = f"waits for {shown}{more}" if event.waits else ""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second since the start."""
        num_tokens = max(self.num_tokens, self.num_finished_tokens)
        return num_tokens / max(time.perf_counter() - self.started, 1e-9)


def progress_view(tally: Tally, total: int, console: Console) -> AbstractContextManager[Callable[[], None]]:
    """
    Show a tally until the block ends, by a bar on a terminal or by log lines; the function updates it.

    The rate counts from here: the tally is older than the engines, which took their time to start.
    """
    tally.started = time.perf_counter()
    return _bar(tally, total, console) if console.is_terminal else _log_lines(tally, total)


class _WaitColumn(ProgressColumn):
    """The parts that a run waits for, which no update of the bar tells: nothing happens."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def render(self, task: object) -> Text:
        return Text(self._tally.waits, style="yellow")


@contextmanager
def _bar(tally: Tally, total: int, console: Console) -> Iterator[Callable[[], None]]:
    columns = (
        TextColumn("episodes"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TextColumn("{task.fields[calls]} tool calls"),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        _WaitColumn(tally),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total, rate=0.0, calls=0, failed=0)
        yield lambda: progress.update(
            task,
            completed=tally.num_episodes,
            rate=tally.tokens_per_s,
            calls=tally.num_tool_calls,
            failed=tally.num_failed,
        )


@contextmanager
def _log_lines(tally: Tally, total: int) -> Iterator[Callable[[], None]]:
    """Log every few seconds, and at the end."""
    log = structlog.get_logger()
    logged = time.perf_counter()

    def write(text: str) -> None:
        nonlocal logged
        logged = time.perf_counter()
        log.info(
            text,
            episodes=f"{tally.num_episodes}/{total}",
            tokens_per_s=round(tally.tokens_per_s),
            tool_calls=tally.num_tool_calls,
            failed=tally.num_failed,
        )

    def update() -> None:
        if time.perf_counter() - logged >= _LOG_EVERY_S:
            write("rollout running")

    log.info("rollout started", episodes=total)
    try:
        yield update
    finally:
        write("rollout ended")
