"""
The driver's side of a run: tasks in, finished episodes or a batch out.

The runtime lives on an event loop in a thread of its own, so `generate` may be called from a script, a notebook or a
trainer, and an interrupt in the caller's thread never loses what has finished.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

import structlog
from attrs import define, field

from turnwise.episode_setup import PromptTooLongError
from turnwise.episode_spec import EpisodeSpec, UnfinishedEpisode
from turnwise.errors import DataError, TurnwiseError
from turnwise.observer import RunStarted, WeightsUpdated, unix_s
from turnwise.protocols import Chat
from turnwise.result import EpisodeResult
from turnwise.runtime.finished_episodes import Finished, FinishedEpisodes
from turnwise.runtime.loop_thread import LoopThread
from turnwise.runtime.partial import Enough, Partial, PartialCall, grouped
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import Deliver
from turnwise.summary import batch_timing
from turnwise.telemetry import Observers
from turnwise.types import Status, Task
from turnwise.weights import UpdateReport, Weight

if TYPE_CHECKING:
    from turnwise.batch import RolloutBatch


class Runtime(Protocol):
    """Where episodes run: in this process, or on a cluster."""

    async def start(self) -> None:
        """Get ready."""

    async def run(self, specs: Sequence[EpisodeSpec], deliver: Deliver, cut: asyncio.Event | None = None) -> None:
        """Run every spec and deliver each exactly once, with its place; `cut` aborts those that have not ended."""

    async def abort(self) -> None:
        """End soon, delivering everything."""

    async def update_weights(self, weights: Iterable[Weight], version: int) -> UpdateReport:
        """Bring weights to every replica, also while episodes run; `EngineError` when none took them."""

    async def sleep(self, level: int) -> None:
        """Free the memory of every replica; what is in flight ends as by `abort`."""

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Take the memory of these tags again on every replica."""

    async def memory_bytes(self) -> int:
        """Return what the replicas hold on their devices; 0 when they cannot tell."""

    async def counts(self) -> dict[str, int]:
        """Return how often what went wrong was put right so far; see `RolloutManager.stats`."""

    async def stop(self) -> None:
        """Free everything; harmless a second time."""


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
        weight_version: of the last weight update that was tried; 0 is what the engines started with.
        timing: of the last batch that was made: seconds by verl's names, see `turnwise.summary.batch_timing`.

    Example:
        >>> with manager_of(load_config("run.yaml")) as manager:  # doctest: +SKIP
        ...     batch = manager.generate(tasks, global_step=1)
    """

    runtime: Runtime
    plan: RolloutPlan
    observers: Observers = field(factory=Observers)
    chat: Chat | None = None
    weight_version: int = field(default=0, init=False)
    timing: dict[str, float] = field(factory=dict, init=False)
    _unfinished: list[UnfinishedEpisode] = field(factory=list, init=False)
    _counts: Counter[str] = field(factory=Counter, init=False)
    _thread: LoopThread | None = field(default=None, init=False)
    _switching: threading.RLock = field(factory=threading.RLock, init=False)

    def start(self) -> None:
        """Start the runtime and its engines."""
        if self._thread is None:
            self._thread = LoopThread()
            try:
                self.observers.open()
                self._thread.call(self.runtime.start())
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Stop everything; harmless a second time."""
        if self._thread is not None:
            if self._counts:
                structlog.get_logger().info("episodes in all", **self._final_stats())
            thread, self._thread = self._thread, None
            try:
                thread.call(self.runtime.stop())
            finally:
                thread.close()
                self.observers.close()

    def _final_stats(self) -> dict[str, int]:
        try:
            return self.stats()
        except Exception as error:  # noqa: BLE001 - a cluster that is gone can still be stopped
            structlog.get_logger().debug("no numbers at the end", reason=repr(error))
            return dict(self._counts)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def generate(
        self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False, **partial: Unpack[Partial]
    ) -> RolloutBatch:
        """
        Run every task and return the batch: a barrier.

        Args:
            tasks: the rows; may be empty when there is something to resume.
            global_step: training step that asks for them.
            validation: sample with the validation parameters.
            partial: `min_fraction`, `grace_s` and `resume`, see `turnwise.runtime.partial.Partial`; also for the other
                ways to run tasks.

        Returns:
            One row per trajectory, in the order of the tasks, resumed episodes first; the rollouts of a task stand
            together.
        """
        return self.collate(self.rollout(tasks, global_step=global_step, validation=validation, **partial))

    def rollout(
        self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False, **partial: Unpack[Partial]
    ) -> list[EpisodeResult]:
        """Run every task and return the episodes in the order of the tasks, resumed ones first."""
        numbered = self.numbered(tasks, global_step=global_step, validation=validation, **partial)
        return [result for _number, result in sorted(numbered, key=lambda pair: pair[0])]

    def iterate(
        self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False, **partial: Unpack[Partial]
    ) -> Iterator[EpisodeResult]:
        """
        Return an iterator over the episodes as they finish, in no order.

        It can be asked again after an exception, such as an interrupt: call `abort`, and the rest follows soon with
        what it has.
        """
        return map(_result_of, self.numbered(tasks, global_step=global_step, validation=validation, **partial))

    def numbered(
        self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False, **partial: Unpack[Partial]
    ) -> FinishedEpisodes:
        """Return the same iterator with the place of each episode in the order of the tasks, from 0."""
        finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        total = self._launch(tasks, global_step, validation, partial, finished.put)
        return FinishedEpisodes(total, finished, self._accepted)

    async def stream(
        self, tasks: Iterable[Task], *, global_step: int = 0, validation: bool = False, **partial: Unpack[Partial]
    ) -> AsyncIterator[EpisodeResult]:
        """Yield episodes as they finish, on the caller's own event loop; leaving the loop early aborts the rest."""
        loop, finished = asyncio.get_running_loop(), asyncio.Queue[Finished]()

        def put(item: Finished) -> None:
            loop.call_soon_threadsafe(finished.put_nowait, item)

        self._launch(tasks, global_step, validation, partial, put)
        complete = False
        try:
            while (item := await finished.get()) is not None:
                if result := self._accepted(item):
                    yield result[1]
            complete = True
        finally:
            if not complete:
                self.abort()

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """
        The episodes that were cut or aborted in calls so far and not resumed since.

        Those that `min_fraction` cut are nowhere else; those of an `abort` are also among the results, as aborted.
        """
        return tuple(self._unfinished)

    def stats(self) -> dict[str, int]:
        """
        Return what became of the episodes so far, and how often what went wrong was put right.

        Returns:
            `completed`, `truncated`, `timed_out`, `aborted` and `failed` episodes, those `cut` by `min_fraction` and
            those `resumed`. Under Ray also episodes `retried` because their worker died and `set_aside` because several
            did, `worker_restarts` and `replica_restarts`, and `moves` of requests to another replica, as far as the
            workers that run know.
        """
        thread = self._thread
        mended = thread.call(self.runtime.counts()) if thread is not None else {}
        return {**{str(status): self._counts[status] for status in Status}, **mended} | {
            name: self._counts[name] for name in ("cut", "resumed")
        }

    def forget(self, unfinished: Iterable[UnfinishedEpisode]) -> None:
        """Keep some unfinished episodes no longer; unknown ones are ignored."""
        forgotten = set(map(id, unfinished))
        self._unfinished[:] = [each for each in self._unfinished if id(each) not in forgotten]

    def abort(self) -> None:
        """Ask every running episode to stop; the calls that wait for them return soon."""
        if self._thread is not None:
            self._thread.submit(self.runtime.abort())

    def update_weights(self, weights: Any, *, version: int | None = None) -> UpdateReport:
        """
        Bring new weights to every replica, also while episodes run in other threads. Waits until all have answered.

        Args:
            weights: with the names of the Hugging Face state dict: (name, array) pairs, a module of torch, a mapping,
                a folder of safetensors; see `turnwise.weight_sources.source_of`.
            version: of these weights; one more than the last unless given.

        Raises:
            EngineError: no replica took them, and what served before serves on.
            ValueError: the version is not above the last one.
        """
        with self._switching:
            number = self.weight_version + 1 if version is None else version
            if number <= self.weight_version:
                raise ValueError(f"weight version {number} is not above the last one, {self.weight_version}")
            thread = self._running_thread()
            self.weight_version = number
            started_at = unix_s(time.perf_counter())
            report = thread.call(self.runtime.update_weights(weights, number))
        self._tell_of_update(report, started_at)
        return report

    def sleep(self, level: int = 1) -> None:
        """Free the memory of every replica; requests in flight end as by `abort`, later ones raise `EngineError`."""
        with self._switching:
            self._running_thread().call(self.runtime.sleep(level))

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory of these tags again on every replica."""
        with self._switching:
            self._running_thread().call(self.runtime.wake_up(tags))

    def memory_bytes(self) -> int:
        """Return the bytes that the replicas hold on their devices; 0 when they cannot tell."""
        return self._running_thread().call(self.runtime.memory_bytes())

    def collate(self, results: Sequence[EpisodeResult]) -> RolloutBatch:
        """Return the batch of some episodes, with the fields of the postprocessors."""
        from turnwise.batch import collate  # torch is only needed here

        self.timing = batch_timing(results)
        batch = collate(
            results,
            pad_token_id=self.plan.pad_token_id,
            prompt_length=self.plan.prompt_length,
            response_length=self.plan.response_length,
        )
        for postprocessor in self.plan.postprocessors:
            batch = batch.with_fields(postprocessor.process(batch))
        return batch

    def _tell_of_update(self, report: UpdateReport, started_at: float) -> None:
        for update in report.replicas:
            if not update.error:
                event = WeightsUpdated(
                    version=report.version,
                    seconds=update.seconds,
                    num_bytes=report.num_bytes,
                    replica=update.replica,
                    started_at=started_at,
                )
                self.observers.emit("on_weights_updated", event)

    def _launch(
        self,
        tasks: Iterable[Task],
        global_step: int,
        validation: bool,
        partial: Partial,
        put: Callable[[Finished], None],
    ) -> int:
        """Begin a call and return how many episodes it has."""
        thread = self._running_thread()
        enough = Enough(min_fraction=partial.get("min_fraction", 1.0), grace_s=partial.get("grace_s", 0.0))
        specs = self._specs(list(tasks), global_step, partial.get("resume", False), validation=validation)
        self.observers.emit(
            "on_run_started", RunStarted(num_episodes=len(specs), global_step=global_step, validation=validation)
        )
        thread.submit(self._run(specs, put, enough))
        return len(specs)

    def _specs(
        self, tasks: list[Task], global_step: int, resume: bool | Iterable[UnfinishedEpisode], *, validation: bool
    ) -> list[EpisodeSpec]:
        chosen = self.unfinished if resume is True else tuple(resume or ())
        for unfinished in chosen:
            self.plan.refuse_unknown_agent(unfinished.spec)
        if len(set(map(id, chosen))) < len(chosen):
            raise DataError("resume: an unfinished episode is given more than once, and would count twice")
        new = self.plan.specs(tasks, global_step=global_step, validation=validation) if tasks or not chosen else []
        self.forget(chosen)
        self._counts["resumed"] += sum(unfinished.began for unfinished in chosen)
        return grouped([*(unfinished.resumed_spec for unfinished in chosen), *new]) if chosen else new

    def _running_thread(self) -> LoopThread:
        if self._thread is None:
            raise TurnwiseError("the manager is not running: use it in a with statement, or call start()")
        return self._thread

    async def _run(self, specs: Sequence[EpisodeSpec], put: Callable[[Finished], None], enough: Enough) -> None:
        """Run on the runtime's loop; the last thing put is None, after an exception if there was one."""
        call = PartialCall(len(specs), enough, lambda number, result: put((number, result)), self._keep)
        try:
            await self.runtime.run(specs, call.deliver, call.cut)
        except BaseException as error:
            put(error)
            raise
        finally:
            put(None)

    def _keep(self, unfinished: UnfinishedEpisode) -> None:
        self._counts["cut"] += 1
        self._unfinished.append(unfinished)

    def _accepted(self, item: tuple[int, EpisodeResult] | BaseException) -> tuple[int, EpisodeResult] | None:
        """Return what the caller gets to see: by the prompt policy a long prompt ends the run or is left out."""
        if isinstance(item, BaseException):
            raise item
        self._counts[item[1].status] += 1
        if item[1].unfinished is not None:
            self._unfinished.append(item[1].unfinished)
        fault = item[1].fault
        if fault is None or fault.kind != PromptTooLongError.__name__:
            return item
        if self.plan.prompt_policy == "drop":
            return None
        self.abort()
        raise PromptTooLongError(fault.message)


def _result_of(numbered: tuple[int, EpisodeResult]) -> EpisodeResult:
    return numbered[1]
