"""
The driver's side of a run: tasks in, finished episodes or a batch out.

The runtime lives on an event loop in a thread of its own, so `generate` may be called from a script, a notebook or a
trainer, and an interrupt in the caller's thread never loses what has finished.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from attrs import define, field

from turnwise.episode_setup import EpisodeSpec, PromptTooLongError
from turnwise.errors import TurnwiseError
from turnwise.observer import RunStarted
from turnwise.protocols import Chat
from turnwise.result import EpisodeResult
from turnwise.runtime.loop_thread import LoopThread
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import Deliver
from turnwise.telemetry import Observers
from turnwise.types import Task

if TYPE_CHECKING:
    from turnwise.batch import RolloutBatch

Finished = tuple[int, EpisodeResult] | BaseException | None


class Runtime(Protocol):
    """Where episodes run: in this process, or on a cluster."""

    async def start(self) -> None:
        """Get ready."""

    async def run(self, specs: Sequence[EpisodeSpec], deliver: Deliver) -> None:
        """Run every spec and deliver each exactly once, with its place."""

    async def abort(self) -> None:
        """End soon, delivering everything."""

    async def stop(self) -> None:
        """Free everything; harmless a second time."""


@define(eq=False)
class FinishedEpisodes:
    """
    Episodes with their places, as they finish. Not a generator, so that an interrupt does not end it.

    Attributes:
        total: how many there will be.
    """

    total: int
    _finished: queue.SimpleQueue[Finished]
    _accept: Callable[[tuple[int, EpisodeResult] | BaseException], tuple[int, EpisodeResult] | None]

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> tuple[int, EpisodeResult]:
        """Wait for the next episode."""
        while (item := self._finished.get()) is not None:
            if accepted := self._accept(item):
                return accepted
        self.close()
        raise StopIteration

    def close(self) -> None:
        """End the iteration, also one that waits in another thread or in the frame that a signal interrupted."""
        self._finished.put(None)


@define(eq=False)
class RolloutManager:
    """
    Runs tasks and hands back what a trainer can use. Use it as a context manager, or call `start` and `stop`.

    Make one with `turnwise.manager_of`.

    Attributes:
        runtime: where episodes run.
        plan: how tasks become episodes and episodes a batch.
        observers: who hears the events.
        chat: the model's chat template and tokenizer, when there is one.

    Example:
        >>> with manager_of(load_config("run.yaml")) as manager:  # doctest: +SKIP
        ...     batch = manager.generate(tasks, global_step=1)
    """

    runtime: Runtime
    plan: RolloutPlan
    observers: Observers = field(factory=Observers)
    chat: Chat | None = None
    _thread: LoopThread | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the runtime and its engines."""
        if self._thread is None:
            self._thread = LoopThread()
            try:
                self._thread.call(self.runtime.start())
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Stop everything; harmless a second time."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            try:
                thread.call(self.runtime.stop())
            finally:
                thread.close()

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def generate(self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False) -> RolloutBatch:
        """
        Run every task and return the batch: a barrier.

        Returns:
            One row per trajectory, in the order of the tasks; the rollouts of a task stand together.
        """
        return self.collate(self.rollout(tasks, global_step=global_step, validation=validation))

    def rollout(self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False) -> list[EpisodeResult]:
        """Run every task and return the episodes in the order of the tasks."""
        numbered = self.numbered(tasks, global_step=global_step, validation=validation)
        return [result for _number, result in sorted(numbered, key=lambda pair: pair[0])]

    def iterate(
        self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False
    ) -> Iterator[EpisodeResult]:
        """
        Return an iterator over the episodes as they finish, in no order.

        It can be asked again after an exception, such as an interrupt: call `abort`, and the rest follows soon with
        what it has.
        """
        return map(_result_of, self.numbered(tasks, global_step=global_step, validation=validation))

    def numbered(self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False) -> FinishedEpisodes:
        """Return the same iterator with the place of each episode in the order of the tasks, from 0."""
        finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        specs = self.plan.specs(tasks, global_step=global_step, validation=validation)
        self._launch(specs, finished.put)
        return FinishedEpisodes(len(specs), finished, self._accepted)

    async def stream(
        self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False
    ) -> AsyncIterator[EpisodeResult]:
        """Yield episodes as they finish, on the caller's own event loop; leaving the loop early aborts the rest."""
        loop, finished = asyncio.get_running_loop(), asyncio.Queue[Finished]()
        specs = self.plan.specs(tasks, global_step=global_step, validation=validation)

        def put(item: Finished) -> None:
            loop.call_soon_threadsafe(finished.put_nowait, item)

        self._launch(specs, put)
        complete = False
        try:
            while (item := await finished.get()) is not None:
                if result := self._accepted(item):
                    yield result[1]
            complete = True
        finally:
            if not complete:
                self.abort()

    def abort(self) -> None:
        """Ask every running episode to stop; the calls that wait for them return soon."""
        if self._thread is not None:
            self._thread.submit(self.runtime.abort())

    def collate(self, results: Sequence[EpisodeResult]) -> RolloutBatch:
        """Return the batch of some episodes, with the fields of the postprocessors."""
        from turnwise.batch import collate  # torch is only needed here

        batch = collate(
            results,
            pad_token_id=self.plan.pad_token_id,
            prompt_length=self.plan.prompt_length,
            response_length=self.plan.response_length,
        )
        for postprocessor in self.plan.postprocessors:
            batch = batch.with_fields(postprocessor.process(batch))
        return batch

    def _launch(self, specs: Sequence[EpisodeSpec], put: Callable[[Finished], None]) -> None:
        if self._thread is None:
            raise TurnwiseError("the manager is not running: use it in a with statement, or call start()")
        first = specs[0]
        event = RunStarted(num_episodes=len(specs), global_step=first.global_step, validation=first.validation)
        self.observers.emit("on_run_started", event)
        self._thread.submit(self._run(specs, put))

    async def _run(self, specs: Sequence[EpisodeSpec], put: Callable[[Finished], None]) -> None:
        """Run on the runtime's loop; the last thing put is None, after an exception if there was one."""
        try:
            await self.runtime.run(specs, lambda number, result: put((number, result)))
        except BaseException as error:
            put(error)
            raise
        finally:
            put(None)

    def _accepted(self, item: tuple[int, EpisodeResult] | BaseException) -> tuple[int, EpisodeResult] | None:
        """Return what the caller gets to see: by the prompt policy a long prompt ends the run or is left out."""
        if isinstance(item, BaseException):
            raise item
        fault = item[1].fault
        if fault is None or fault.kind != PromptTooLongError.__name__:
            return item
        if self.plan.prompt_policy == "drop":
            return None
        self.abort()
        raise PromptTooLongError(fault.message)


def _result_of(numbered: tuple[int, EpisodeResult]) -> EpisodeResult:
    return numbered[1]
