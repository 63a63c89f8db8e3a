"""
Keeps groups of episodes in flight, in its own thread, and can pause them for a checkpoint.

Methods called from other threads schedule their work on the producer's event loop, so its state needs no lock.
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
from turnwise_rollout_buffer.buffer import TrajectoryBuffer
from turnwise_rollout_buffer.task_stream import TaskStream

_POLL_S: Final = 1.0
"""How often a caller that waits for the producer's thread checks that the thread is alive."""


@frozen
class _GroupWork:
    """A group to roll out: a new task, or the unfinished episodes of an interrupted group."""

    uid: str
    step: int
    tasks: tuple[Task, ...] = ()
    unfinished: tuple[UnfinishedEpisode, ...] = ()


@define(eq=False)
class GroupProducer:
    """
    Rolls out groups and puts their episodes into the buffer.

    Each launched group is for a training step, the first `tasks_per_step` for step 1, and so on; task and step are the
    group's name, from which its seeds derive. So a task is launched once for a step, also when the trainer has taken
    its group already. A step for which every task was launched has no more groups.

    Attributes:
        manager: started.
        stream: the tasks.
        buffer: receives the episodes; it is closed when the producer ends.
        limit: most groups in flight, in the buffer and in training together.
        tasks_per_step: how many groups are launched for each training step.
        on_episode: called in the producer's thread with every finished episode.
        launched: number of launched groups; the next one is for the training step 1 + launched // tasks_per_step.
        launched_for: the tasks that were launched for a step, by step; those of passed steps are forgotten.
        oldest_step: the trainer has completed all steps before this one.
        uniform_limit: no group is launched once the buffer has dropped this many for lack of variance; None for no
            limit.
        failure: the exception that ended the producer, if any.
    """

    manager: RolloutManager
    stream: TaskStream
    buffer: TrajectoryBuffer
    limit: int
    tasks_per_step: int
    on_episode: Callable[[EpisodeResult], None]
    launched: int = 0
    launched_for: dict[int, list[str]] = field(factory=dict)
    oldest_step: int = 1
    uniform_limit: int | None = None
    failure: BaseException | None = field(default=None, init=False)
    # Interrupted groups, which are resumed before new ones are launched, and running groups by task.
    _interrupted: list[_GroupWork] = field(factory=list, init=False)
    _in_flight: dict[str, _GroupWork] = field(factory=dict, init=False)
    _paused: bool = field(default=False, init=False)
    _interrupting: bool = field(default=False, init=False)
    _stopping: bool = field(default=False, init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _changed: asyncio.Event = field(init=False)
    _ready: threading.Event = field(factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _uids: frozenset[str] = field(default=frozenset(), init=False)

    # Called from the trainer's thread

    def start(self) -> None:
        """Start the thread."""
        self._uids = frozenset(task.uid for task in self.stream.tasks)
        self._thread = threading.Thread(target=self._run, name="turnwise-rollout", daemon=True)
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Interrupt all groups and end the thread; `unfinished` then has the interrupted episodes."""
        self._run_on_loop(self._stop)
        if self._thread is not None:
            self._thread.join()

    def notify(self) -> None:
        """Check again whether a group can be launched."""
        with suppress(RuntimeError):  # the loop is closed: the producer has ended, and `failure` has the reason
            self._loop.call_soon_threadsafe(self._changed.set)

    def interrupt_soon(self) -> None:
        """Launch no more groups, and keep aborted episodes as interrupted; safe to call from a signal handler."""
        # Not `_paused`: a checkpoint that ends between this call and the abort would reset it, and the buffer would get
        # the aborted episodes as ended ones.
        self._interrupting = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """
        Interrupt all groups, and resume them after the body. Meanwhile `unfinished` has the interrupted episodes.

        Raises:
            BaseException: the `failure`, if there is one.
        """
        self._run_on_loop(self._pause)
        if self.failure is not None:
            raise self.failure
        yield
        self._run_on_loop(self._resume)

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """Interrupted episodes that have not been resumed."""
        return tuple(each for work in self._interrupted for each in work.unfinished)

    def load_partial(self, unfinished: Sequence[UnfinishedEpisode]) -> None:
        """Add episodes that another producer interrupted; call it before `start`."""
        groups: dict[tuple[str, int], list[UnfinishedEpisode]] = {}
        for each in unfinished:
            groups.setdefault((each.spec.task.uid, each.spec.global_step), []).append(each)
        self._interrupted = [_GroupWork(uid, step, unfinished=tuple(group)) for (uid, step), group in groups.items()]

    def _run_on_loop(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine on the event loop and wait for it; do nothing before the start and after the end."""
        if self._thread is None:
            return
        coroutine = function()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed: the producer has ended, and `failure` has the reason
            coroutine.close()
            return
        # The thread may end between the call above and its execution. The future would then never be done.
        while not future.done() and self._thread.is_alive():
            with suppress(TimeoutError, CancelledError):
                future.result(timeout=_POLL_S)

    # In the producer's thread

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
                    await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        # Nothing awaits between the caller's check of the state and `clear`, so no change can be missed.
        self._changed.clear()
        await self._changed.wait()

    def _has_room(self) -> bool:
        num_in_flight = len(self._in_flight)
        if self._keeps_aborted or num_in_flight + self.buffer.num_held >= self.buffer.max_groups:
            return False
        # Groups in training count until the version rises: a group launched before that is behind by this update, too.
        if num_in_flight + self.buffer.num_ahead >= self.limit:
            return False
        if self.uniform_limit is not None and self.buffer.counts["dropped_uniform"] >= self.uniform_limit:
            return False
        return bool(self._interrupted) or bool(self._uids - self._excluded_uids())

    def _excluded_uids(self) -> set[str]:
        """
        Return tasks that must not be launched now: another group of this task and step is or was there.

        A group of an earlier step in flight excludes its task too: `_in_flight` has one group of a task.
        """
        if self._uids <= self._launched_now():
            self.launched = self._next_step * self.tasks_per_step
        return {*self._in_flight, *self._launched_now()}

    def _launched_now(self) -> set[str]:
        # The buffer may have groups of this step that another source launched, from the checkpoint of a mode `sync`.
        return {*self.launched_for.get(self._next_step, ()), *self.buffer.uids_at(self._next_step)}

    @property
    def _keeps_aborted(self) -> bool:
        return self._paused or self._interrupting

    @property
    def _next_step(self) -> int:
        return 1 + self.launched // self.tasks_per_step

    def _next(self) -> _GroupWork:
        if self._interrupted:
            work = self._interrupted.pop(0)
        else:
            (task,) = self.stream.take(1, without=self._excluded_uids())
            work = _GroupWork(task.uid, self._next_step, tasks=(task,))
            for passed in [step for step in self.launched_for if step < min(self.oldest_step, work.step)]:
                del self.launched_for[passed]
            self.launched_for.setdefault(work.step, []).append(task.uid)
            self.launched += 1
        self._in_flight[work.uid] = work
        return work

    async def _roll_out(self, work: _GroupWork) -> None:
        unfinished: list[UnfinishedEpisode] = []
        async for episode in self.manager.stream(work.tasks, global_step=work.step, resume=work.unfinished):
            if self._keeps_aborted and episode.unfinished is not None:
                unfinished.append(episode.unfinished)
            else:
                # The buffer has room, because `_has_room` launches no more groups than it can take.
                self.buffer.put(episode, timeout_s=0)
                self.on_episode(episode)
        del self._in_flight[work.uid]
        if unfinished:
            self._interrupted.append(_GroupWork(work.uid, work.step, unfinished=tuple(unfinished)))
        else:
            # If the prompt policy dropped the task, its group stays incomplete.
            self.buffer.discard((work.uid, work.step, False))
        self._changed.set()

    async def _pause(self) -> None:
        self._paused = True
        # Tasks created before this point run first, so their episodes exist and the abort reaches them.
        await asyncio.sleep(0)
        aborted = self.manager.abort()
        while self._in_flight:
            await self._wait_for_change()
        # The groups may have ended by themselves. The abort would then end the next ones, which `_resume` launches.
        if aborted is not None:
            await asyncio.wrap_future(aborted)

    async def _resume(self) -> None:
        self._paused = False
        self._changed.set()

    async def _stop(self) -> None:
        await self._pause()
        self._stopping = True
        self._changed.set()
