"""
Keeps groups of episodes on their way, in a thread of its own, and can hold them for a checkpoint.

Whatever is said to it from other threads is done on its event loop, so its own state needs no lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import Any, Final

from attrs import define, field, frozen

from turnwise import EpisodeResult, RolloutManager, Task, UnfinishedEpisode
from turnwise_grpo_trainer.buffer import TrajectoryBuffer
from turnwise_grpo_trainer.task_stream import TaskStream

_LOOK_S: Final = 1.0
"""Between two looks whether the thread is alive that is to answer."""


@frozen
class _Work:
    """A group to roll out: a task, or what is left of a group that was cut."""

    uid: str
    step: int
    tasks: tuple[Task, ...] = ()
    unfinished: tuple[UnfinishedEpisode, ...] = ()


@define(eq=False)
class GroupProducer:
    """
    Rolls out groups and puts their episodes into the buffer.

    Attributes:
        manager: started.
        stream: of the tasks.
        buffer: where episodes go; closed when nothing more will come.
        limit: groups that may be on their way, wait, or be learnt from.
        tasks_per_step: by which new groups get the number of a step.
        seen: called in the producer's thread with every episode.
        launched: groups that were begun.
        until_uniform: groups dropped for no variance, at which no more are begun; None for no such bound.
        failure: what ended it, if it was not `stop`.
    """

    manager: RolloutManager
    stream: TaskStream
    buffer: TrajectoryBuffer
    limit: int
    tasks_per_step: int
    seen: Callable[[EpisodeResult], None]
    launched: int = 0
    until_uniform: int | None = None
    failure: BaseException | None = field(default=None, init=False)
    _cut: list[_Work] = field(factory=list, init=False)
    _underway: dict[str, _Work] = field(factory=dict, init=False)
    _held: bool = field(default=False, init=False)
    _stopping: bool = field(default=False, init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _changed: asyncio.Event = field(init=False)
    _ready: threading.Event = field(factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _uids: frozenset[str] = field(default=frozenset(), init=False)

    # From the trainer's thread

    def start(self) -> None:
        """Begin."""
        self._uids = frozenset(task.uid for task in self.stream.tasks)
        self._thread = threading.Thread(target=self._run, name="turnwise-rollout", daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Cut every group and end; `unfinished` has all that was cut."""
        self._ask(self._stop)
        if self._thread is not None:
            self._thread.join()

    def look_again(self) -> None:
        """Say that there may be room."""
        with suppress(RuntimeError):  # a loop that is closed has ended, and `failure` says why
            self._loop.call_soon_threadsafe(self._changed.set)

    def hold_soon(self) -> None:
        """Say that the next abort is meant for the groups; may be called from a signal handler."""
        self._held = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """
        Cut every group; they go on after the body. Meanwhile nothing moves, and `unfinished` has all that was cut.

        Raises:
            BaseException: the `failure`, when there is one.
        """
        self._ask(self._hold)
        if self.failure is not None:
            raise self.failure
        yield
        self._ask(self._go_on)

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """Episodes that were cut and have not gone on."""
        return tuple(each for work in self._cut for each in work.unfinished)

    def go_on_with(self, unfinished: Sequence[UnfinishedEpisode]) -> None:
        """Take what another producer had cut; before `start`."""
        groups: dict[tuple[str, int], list[UnfinishedEpisode]] = {}
        for each in unfinished:
            groups.setdefault((each.spec.task.uid, each.spec.global_step), []).append(each)
        self._cut = [_Work(uid, step, unfinished=tuple(group)) for (uid, step), group in groups.items()]

    def _ask(self, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something on the event loop and wait for it; nothing is done when the producer has not begun or ended."""
        if self._thread is None:
            return
        coroutine = what()
        try:
            asked = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # a loop that is closed has ended, and `failure` says why
            coroutine.close()
            return
        while not asked.done() and self._thread.is_alive():
            with suppress(TimeoutError, CancelledError):
                asked.result(timeout=_LOOK_S)

    # In its own thread

    def _run(self) -> None:
        try:
            asyncio.run(self._produce())
        except BaseException as error:  # noqa: BLE001 - the trainer's thread raises it
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            self.failure = error
        finally:
            self._ready.set()
            self.buffer.close()

    async def _produce(self) -> None:
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        async with asyncio.TaskGroup() as group:
            while not self._stopping:
                if self._has_room():
                    group.create_task(self._roll_out(self._next()))
                else:
                    await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _has_room(self) -> bool:
        underway = len(self._underway)
        if self._held or underway + len(self.buffer) >= self.buffer.max_groups:
            return False
        # What is learnt from counts until the version has risen: what is begun before is behind by that update, too.
        if underway + self.buffer.num_ahead >= self.limit:
            return False
        if self.until_uniform is not None and self.buffer.counts["dropped_uniform"] >= self.until_uniform:
            return False
        return bool(self._cut) or bool(self._uids - self._not_now())

    def _not_now(self) -> set[str]:
        """Return the tasks that are not begun again yet, so that groups do not mix: those on their way or waiting."""
        return {*self._underway, *self.buffer.uids_of(self._next_step)}

    @property
    def _next_step(self) -> int:
        return 1 + self.launched // self.tasks_per_step

    def _next(self) -> _Work:
        if self._cut:
            work = self._cut.pop(0)
        else:
            (task,) = self.stream.take(1, without=self._not_now())
            work = _Work(task.uid, self._next_step, tasks=(task,))
            self.launched += 1
        self._underway[work.uid] = work
        return work

    async def _roll_out(self, work: _Work) -> None:
        left: list[UnfinishedEpisode] = []
        async for episode in self.manager.stream(work.tasks, global_step=work.step, resume=work.unfinished):
            if self._held and episode.unfinished is not None:
                left.append(episode.unfinished)
            else:
                # There is room: no more groups are begun than the buffer can take.
                self.buffer.put(episode, timeout_s=0)
                self.seen(episode)
        del self._underway[work.uid]
        if left:
            self._cut.append(_Work(work.uid, work.step, unfinished=tuple(left)))
        else:
            self.buffer.forget((work.uid, work.step, False))  # where a prompt was dropped, the group stays incomplete
        self._changed.set()

    async def _hold(self) -> None:
        self._held = True
        # The tasks of groups that are begun already come first: none of them escapes the abort.
        await asyncio.sleep(0)
        self.manager.abort()
        while self._underway:
            await self._change()

    async def _go_on(self) -> None:
        self._held = False
        self._changed.set()

    async def _stop(self) -> None:
        await self._hold()
        self._stopping = True
        self._changed.set()
