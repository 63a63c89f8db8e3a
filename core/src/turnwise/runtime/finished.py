"""Finished episodes on their way from the runtime's thread to the caller, and the open call that a caller feeds."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Self

from attrs import define, field

from turnwise.errors import TurnwiseError
from turnwise.record.result import EpisodeResult
from turnwise.runtime.loop_thread import CHECK_S
from turnwise.types import Task

Finished = tuple[int, EpisodeResult] | BaseException | None
"""An episode with its number, an exception that ended the call, or None at the end."""


@define(eq=False)
class FinishedEpisodes:
    """
    Episodes with their numbers, as they finish, for a loop or an async loop. The call has `total` episodes.

    It is not a generator: an exception inside a generator's frame, such as an interrupt, would end the iteration.
    """

    total: int
    _accept: Callable[[tuple[int, EpisodeResult] | BaseException], tuple[int, EpisodeResult] | None]
    _finished: queue.SimpleQueue[Finished] = field(factory=queue.SimpleQueue, init=False)
    _wakers: list[Callable[[], object]] = field(factory=list, init=False)

    def put(self, item: Finished) -> None:
        """Add an item, in the runtime's thread."""
        self._finished.put(item)
        for wake in tuple(self._wakers):
            with suppress(RuntimeError):  # the event loop of this reader is closed
                wake()

    def put_episode(self, number: int, result: EpisodeResult) -> None:
        """Add an episode, in the runtime's thread."""
        self.put((number, result))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, EpisodeResult]:
        while (item := self._wait()) is not None:
            if accepted := self._accept(item):  # None for an episode that the prompt policy drops
                return accepted
        self.close()  # another call of `next` must end too, and not wait for an empty queue
        raise StopIteration

    def _wait(self) -> Finished:
        while True:
            # A wait without a limit would not end for an interrupt that comes just before it, as in `LoopThread.call`.
            with suppress(queue.Empty):
                return self._finished.get(timeout=CHECK_S)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, EpisodeResult]:
        woken = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)
        self._wakers.append(wake)
        try:
            while (item := await self._get(woken)) is not None:
                if accepted := self._accept(item):
                    return accepted
        finally:
            self._wakers.remove(wake)
        self.close()
        raise StopAsyncIteration

    async def _get(self, woken: asyncio.Event) -> Finished:
        while True:
            woken.clear()  # before the look into the queue, so that an item that comes after it wakes this task
            try:
                return self._finished.get_nowait()
            except queue.Empty:
                await woken.wait()

    def close(self) -> None:
        """End the iteration, even if another thread or the frame below a signal handler waits in it."""
        self.put(None)


@define(eq=False)
class OpenEpisodes:
    """The number of episodes of an open call whose results are not taken yet, at most `limit`."""

    limit: int | None
    _num: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)

    def add(self, num: int, timeout_s: float | None) -> None:
        """Wait for room for some episodes; see `TaskFeed.submit` for the errors."""

        def is_free() -> bool:
            return self._closed or self.limit is None or self._num + num <= self.limit

        if self.limit is not None and num > self.limit:
            raise ValueError(f"a task has {num} episodes, more than the limit of {self.limit}")
        with self._changed:
            if not self._changed.wait_for(is_free, timeout_s):
                raise TimeoutError(f"{self._num} of {self.limit} episodes are open, and no result was taken in time")
            if self._closed:
                raise TurnwiseError("the task feed is closed")
            self._num += num

    def remove(self, num: int = 1) -> None:
        """Count episodes as taken."""
        with self._changed:
            self._num -= num
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse more episodes, also the waiting ones."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@define(eq=False)
class TaskFeed:
    """
    An open call: tasks may be submitted while the episodes of earlier ones run. `RolloutManager.open` opens one.

    A loop or an async loop over it returns each episode when it finishes, and ends after `close` with the last one. To
    leave its `with` block, or to drop the last reference to it, aborts the episodes without a reader.
    `RolloutManager.abort` closes it.
    """

    _finished: FinishedEpisodes
    _open: OpenEpisodes
    _group_size: int
    _add: Callable[[Task, int | None], None]
    _close_soon: Callable[[], None]
    _abandon_soon: Callable[[], None]
    _abandon: weakref.finalize[[], TaskFeed] = field(init=False)

    def __attrs_post_init__(self) -> None:
        # Neither the call nor its results refer to the feed, so a dropped feed is freed while its episodes run.
        self._abandon = weakref.finalize(self, self._abandon_soon)
        self._abandon.atexit = False

    def submit(self, task: Task, *, rollout_n: int | None = None, timeout_s: float | None = None) -> int:
        """
        Submit a task and return its number of episodes; safe to call from any thread.

        Args:
            task: a row of the data set. The same uid again continues the count of its rollouts.
            rollout_n: run only the episode of this number, from 0; None runs as many as the config says.
            timeout_s: longest wait for room, if the feed has a limit; None waits until there is room.

        Raises:
            TimeoutError: there was no room in time.
            TurnwiseError: the feed is closed, or the call has ended.
            DataError: the task names an unknown agent.
            ValueError: the task has more episodes than the limit.
        """
        num = self._group_size if rollout_n is None else 1
        self._open.add(num, timeout_s)
        try:
            self._add(task, rollout_n)
        except BaseException:
            self._open.remove(num)
            raise
        return num

    def close(self) -> None:
        """Declare that no more tasks will come; a second call does nothing."""
        self._open.close()
        self._close_soon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
        self._abandon()

    def __iter__(self) -> Iterator[EpisodeResult]:
        return map(itemgetter(1), self._finished)

    async def __aiter__(self) -> AsyncIterator[EpisodeResult]:
        async for _number, result in self._finished:
            yield result
