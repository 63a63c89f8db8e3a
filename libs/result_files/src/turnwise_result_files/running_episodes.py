"""
The episodes that run now: an observer keeps them in a small file beside the finished ones, for readers of the folder.

The file is replaced at most once a second, and every few seconds without a change. It is removed at the end of the run;
a killed run leaves it behind, so a reader ignores a file that is not replaced any more.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

import structlog
from attrs import asdict, define, field

from turnwise.errors import describe
from turnwise.events.observer import (
    EpisodeEvent,
    EpisodesRetried,
    EpisodeStarted,
    Observer,
    RewardFinished,
    ToolFinished,
    TurnFinished,
)
from turnwise.files import partial_path
from turnwise.record.result import EpisodeResult

RUNNING_FILE: Final = "running.json"
_WRITE_S: Final = 1.0
_BEAT_S: Final = 5.0
_STALE_S: Final = 20.0
"""A file of this age is of a killed run."""
_MAX_WRITTEN: Final = 500
"""Episodes in the file, the longest-running first; `total` counts all."""


@define
class _Running:
    """`key` is as in `episode_key`; times are Unix seconds, and `last` names the last event of the episode."""

    key: str
    agent_name: str
    worker: str
    started_at: float
    num_turns: int = 0
    num_tokens: int = 0
    last: str = "start"
    last_at: float = 0.0

    def fits(self) -> bool:
        """Return whether the values, which a file may have, are of their types."""
        texts, numbers = (self.key, self.agent_name, self.worker, self.last), (self.num_turns, self.num_tokens)
        times = (self.started_at, self.last_at)
        return all(isinstance(each, str) for each in texts) and all(
            isinstance(each, int | float) and math.isfinite(each) for each in (*numbers, *times)
        )


@define(eq=False)
class RunningEpisodes(Observer):
    """
    Keeps the file of running episodes of a folder. On Ray it is in the driver, which hears the events of all workers.

    Attributes:
        folder: of the run; it exists when the first episode starts.
    """

    place = "driver"

    folder: Path
    _running: dict[str, _Running] = field(factory=dict)
    _changed: bool = False
    _lock: threading.Lock = field(factory=threading.Lock)
    _stopped: threading.Event = field(factory=threading.Event)
    _thread: threading.Thread | None = None

    def open(self) -> None:
        self._thread = threading.Thread(target=self._write_often, name="turnwise-running", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            for file in (self.folder / RUNNING_FILE, partial_path(self.folder / RUNNING_FILE)):  # of a full disk
                file.unlink(missing_ok=True)

    def on_episode_started(self, event: EpisodeStarted) -> None:
        key = episode_key(event.uid, event.global_step, validation=event.validation)
        with self._lock:
            # An episode that continues in a later batch has a new attempt, and its first one has no end.
            for attempt in [name for name, each in self._running.items() if each.key == key]:
                del self._running[attempt]
            self._running[event.key] = _Running(
                key, event.agent_name, event.worker, event.started_at, last_at=event.started_at
            )
            self._changed = True

    def on_turn_finished(self, event: TurnFinished) -> None:
        self._note(event, "turn", event.seconds, num_tokens=event.num_new_tokens)

    def on_tool_finished(self, event: ToolFinished) -> None:
        self._note(event, f"tool {event.tool[:50]}", event.seconds)

    def on_reward_finished(self, event: RewardFinished) -> None:
        self._note(event, "reward", event.seconds)

    def on_episodes_retried(self, event: EpisodesRetried) -> None:
        with self._lock:
            self._running = {key: each for key, each in self._running.items() if each.worker != event.worker}
            self._changed = True

    def on_episode_finished(self, event: EpisodeResult) -> None:
        with self._lock:
            self._changed |= self._running.pop(event.key, None) is not None

    def _note(self, event: EpisodeEvent, last: str, seconds: float, num_tokens: int | None = None) -> None:
        with self._lock:
            if (episode := self._running.get(event.key)) is not None:
                episode.last, episode.last_at = last, event.started_at + seconds
                episode.num_turns += num_tokens is not None
                episode.num_tokens += num_tokens or 0
                self._changed = True

    def _write_often(self) -> None:
        written_at = float("-inf")
        while not self._stopped.wait(_WRITE_S):
            with self._lock:
                due = self._changed or (bool(self._running) and time.monotonic() - written_at > _BEAT_S)
                text, self._changed = (self._describe() if due else ""), False
            if due:
                try:
                    self._write(text)
                except OSError as error:
                    structlog.get_logger().warning("running episodes cannot be written", reason=describe(error))
                    return
                written_at = time.monotonic()

    def _describe(self) -> str:
        longest = sorted(self._running.values(), key=lambda each: each.started_at)[:_MAX_WRITTEN]
        episodes = [asdict(each) for each in longest]
        return json.dumps({"written_at": time.time(), "total": len(self._running), "episodes": episodes})

    def _write(self, text: str) -> None:
        file = self.folder / RUNNING_FILE
        # Not flushed to the disk: after a crash of the machine nothing runs.
        partial_path(file).write_text(text, encoding="utf-8")
        os.replace(partial_path(file), file)


def episode_key(uid: str, global_step: int, *, validation: bool) -> str:
    """Return the name of an episode in its run: `UID/N`, with `@STEP` in a training and `@STEP-held-out`."""
    return f"{uid}{f'@{global_step}' if global_step else ''}{'-held-out' if validation else ''}"


def read_running(folder: Path) -> dict[str, Any] | None:
    """
    Return the running episodes of a folder: `written_at` in Unix seconds, their `total` number, and `episodes`, which
    have `key`, `agent_name`, `worker`, `started_at`, `num_turns`, `num_tokens`, `last` and `last_at`.

    None if nothing runs. Times are on the clock of the run's machine.
    """
    try:
        found: dict[str, Any] = json.loads((folder / RUNNING_FILE).read_text(encoding="utf-8"))
        # The file says what runs now, and is replaced every few seconds: one that is no such file says nothing.
        is_new = time.time() - found["written_at"] < _STALE_S and found["total"] >= 0
        return found if is_new and all(_Running(**each).fits() for each in found["episodes"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
