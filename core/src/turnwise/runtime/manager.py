"""
The driver's side of a run: tasks in, finished episodes or a batch out.

The runtime has its own event loop in its own thread. So `generate` works in a script, a notebook and a trainer, and an
interrupt in the caller's thread loses no finished episode.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Self, Unpack

import structlog
from attrs import define, field

from turnwise.batch.rows import build_rows, collect_rows
from turnwise.errors import PromptTooLongError, TurnwiseError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import RunStarted
from turnwise.protocols import Chat
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import UnfinishedEpisode
from turnwise.runtime.engine_control import EngineControl
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.finished import FinishedEpisodes, OpenEpisodes, TaskFeed
from turnwise.runtime.groups import GroupScoring
from turnwise.runtime.interface import Runtime
from turnwise.runtime.loop_thread import LoopThread, T
from turnwise.runtime.partial import CompletionThreshold, RolloutCall, RolloutOptions, UnfinishedEpisodes
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.prompt_lengths import check_pictures, check_prompts
from turnwise.runtime.wait_reports import WaitReports
from turnwise.types import Capabilities, Status, Task

if TYPE_CHECKING:
    from turnwise.batch.packed_batch import PackedBatch
    from turnwise.batch.rollout_batch import RolloutBatch
    from turnwise.config.own_code import OwnParts
    from turnwise.config.run import RunConfig
    from turnwise.plugin.host import Host


@define(eq=False, repr=False)
class RolloutManager(EngineControl):
    """
    Runs tasks and returns finished episodes. Use it as a context manager, or call `start` and `stop`.

    `RolloutManager.from_config` builds one. `generate`, `rollout`, `iterate` and `stream` run tasks and differ in their
    results. All of them accept the options of `turnwise.runtime.partial.RolloutOptions`. `open` runs tasks that come
    one by one. Several calls may run at the same time.

    Attributes:
        plan: turns tasks into episodes, and episodes into a batch.
        chat: chat template and tokenizer of the model, if there is one.
        groups: scores the episodes of a task together, if there is a group reward.
        prepare: called before the runtime starts; it downloads what engines will read.
        weight_version: version of the last weight update, also of a failed one; 0 at the start.

    Example:
        >>> with RolloutManager.from_config(load_config("run.yaml")) as manager:  # doctest: +SKIP
        ...     batch = manager.generate(tasks, global_step=1)
    """

    runtime: Runtime
    plan: RolloutPlan
    observers: Observers = field(factory=Observers)
    chat: Chat | None = None
    groups: GroupScoring | None = None
    prepare: Callable[[], object] | None = None
    weight_version: int = field(default=0, init=False)
    _unfinished: UnfinishedEpisodes = field(factory=UnfinishedEpisodes, init=False)
    _counts: Counter[str] = field(factory=Counter, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)  # guards `_thread` and `_counts`
    _switching: threading.RLock = field(factory=threading.RLock, init=False)
    _starting: threading.Lock = field(factory=threading.Lock, init=False)
    _thread: LoopThread | None = field(default=None, init=False)
    _reports: WaitReports = field(init=False)
    _pictured: str = field(default="", init=False)  # first row with pictures of the measured data sets
    _calls: dict[RolloutCall, None] = field(factory=dict, init=False)  # in order; on the runtime's loop alone

    def __attrs_post_init__(self) -> None:
        self._reports = WaitReports(self.runtime, self.observers)
        if self.groups is not None:
            self.groups.stage = self._reports.stage

    @classmethod
    def from_config(cls, config: RunConfig, host: Host | None = None, **parts: Unpack[OwnParts]) -> RolloutManager:
        """
        Build a run; `start` starts it.

        Args:
            config: of the run.
            host: the loaded plugins; None loads the plugins that the config allows.
            parts: replace those of the config, as in `reward=my_function`; see `turnwise.config.own_code.OwnParts`.

        Raises:
            ConfigError, PluginError, TemplateError: the config cannot be run; one line for each problem.
        """
        from turnwise.runtime.launch import launch  # importing the manager alone loads no plugin and no config

        return cls(*launch(config, host, parts))

    def start(self) -> None:
        """
        Start the runtime and its engines; a second call waits until they have started, and does nothing.

        Raises:
            ConfigError: the engine does not know an option of `rollout.sampling.extra`, the options of an agent
                exclude it, or it takes no pictures and measured prompts have some.
        """
        with self._starting:
            if self._thread is not None:
                return
            if self.prepare is not None:
                self.prepare()
            self._thread = LoopThread()
            try:
                self.observers.open()
                self._thread.submit(self._reports.run())
                with self.waiting_for("the start of the runtime"):
                    self._thread.call(self.runtime.start())
                self.plan.check_engine(self.runtime)
                check_pictures(self._pictured, self.runtime.capabilities)
                for sampling in (self.plan.sampling, self.plan.validation_sampling):
                    if sampling.extra:
                        self.runtime.capabilities.check_extra(sampling)
            except BaseException:
                self.stop()  # an engine may have started before another one failed, and holds its devices
                raise

    def stop(self) -> None:
        """Stop the runtime and free everything; a second call does nothing."""
        if self._thread is not None and self._counts:
            structlog.get_logger().info("episodes in all", **self._final_stats())
        # Taken away first: a call in another thread gets an error and no closed loop, and a second `stop` does nothing.
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            try:
                with self.waiting_for("the end of the runtime"):
                    thread.call_to_end(self.runtime.stop())  # the first interrupt may not cut the end of Ray
            finally:
                thread.close()
                self.observers.close()

    def waiting_for(self, part: str) -> AbstractContextManager[None]:
        """Return a context whose body the log names if it is long and nothing else happens, as in `the trainer`."""
        return self._reports.stage(part)

    def _final_stats(self) -> dict[str, int]:
        try:
            return self.stats()
        except Exception as error:  # noqa: BLE001 - a lost cluster must not keep the run from stopping
            structlog.get_logger().debug("no runtime counters at the end", reason=repr(error))
            return dict(self._counts)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def check_prompts(self, tasks: Sequence[Task], *, key: str = "data.path") -> None:
        """
        Measure the first prompts of a data set, before the manager starts; see `turnwise.runtime.prompt_lengths`.

        Raises:
            PromptTooLongError: a prompt is longer than `rollout.prompt_length`, and `data.prompt_policy` is `error`.
            ConfigError: a prompt has pictures, and the engine takes none; on Ray, `start` finds that.
        """
        with self.waiting_for("measuring the prompts"):
            pictured = check_prompts(self.plan, tasks, self.runtime.capabilities, key=key)
            self._pictured = self._pictured or pictured

    def generate(self, tasks: Iterable[Task], **options: Unpack[RolloutOptions]) -> RolloutBatch:
        """
        Run every task, wait for all episodes and return their batch, with one row for each trajectory.

        Resumed episodes are first, then the tasks in their order. The rollouts of a task are adjacent.
        There may be no tasks if `resume` names episodes.
        """
        return self.plan.pad(collect_rows(self.iterate_numbered(tasks, **options)))

    def rollout(self, tasks: Iterable[Task], **options: Unpack[RolloutOptions]) -> list[EpisodeResult]:
        """Run every task, wait for all episodes and return them in the order of `generate`."""
        episodes = self.iterate_numbered(tasks, **options)
        return [result for _number, result in sorted(episodes, key=itemgetter(0))]

    def iterate(self, tasks: Iterable[Task], **options: Unpack[RolloutOptions]) -> Iterator[EpisodeResult]:
        """
        Return an iterator over the episodes as they finish.

        The iterator survives an exception such as an interrupt: call `abort`, and it soon returns the remaining
        episodes with the tokens that they have.
        """
        return map(itemgetter(1), self.iterate_numbered(tasks, **options))

    def iterate_numbered(self, tasks: Iterable[Task], **options: Unpack[RolloutOptions]) -> FinishedEpisodes:
        """Return the iterator of `iterate`, with the number of each episode in the order of `generate`, from 0."""
        threshold = CompletionThreshold.from_options(options)
        global_step, validation = options.get("global_step", 0), options.get("validation", False)
        self._running_thread()
        # Before `specs` reads the tasks, because another call may start meanwhile.
        with self._unfinished.taken(options.get("resume", False)) as resumed:
            specs = self.plan.specs(tasks, resumed, global_step=global_step, validation=validation)
        with self._lock:
            self._counts["resumed"] += sum(unfinished.started for unfinished in resumed)
        finished = FinishedEpisodes(len(specs), self._accept)
        call = RolloutCall(EpisodeFeed.of(specs), len(specs), threshold, finished.put_episode, self._keep)
        self._emit_started(len(specs), global_step, validation)
        self._launch(call, finished)
        return finished

    async def stream(self, tasks: Iterable[Task], **options: Unpack[RolloutOptions]) -> AsyncIterator[EpisodeResult]:
        """Yield episodes as they finish, on the caller's event loop; leaving the loop early aborts the others."""
        episodes, complete = self.iterate_numbered(tasks, **options), False
        try:
            async for _number, result in episodes:
                yield result
            complete = True
        finally:
            # After `break`, an exception or a cancellation in the caller's loop the results have no reader.
            if not complete:
                self.abort()

    def open(self, *, global_step: int = 0, validation: bool = False, limit: int | None = None) -> TaskFeed:
        """
        Return an open call, to which tasks may be submitted while others run; the episodes are those of one call.

        Args:
            global_step: training step of the tasks.
            validation: sample with the validation parameters.
            limit: most episodes that were submitted and not yet taken as results; a `submit` beyond it waits.
        """
        thread, episodes = self._running_thread(), OpenEpisodes(limit)

        def accept(item: tuple[int, EpisodeResult] | BaseException) -> tuple[int, EpisodeResult] | None:
            if not isinstance(item, BaseException):
                episodes.remove()
            return self._accept(item)

        finished = FinishedEpisodes(0, accept)
        call = RolloutCall(EpisodeFeed(), 0, CompletionThreshold(), finished.put_episode, self._keep)
        self._launch(call, finished).add_done_callback(lambda _done: episodes.close())
        rollouts = self.plan.count_rollouts()

        def add(task: Task, rollout_n: int | None) -> None:
            specs = self.plan.task_specs(task, rollouts, rollout_n, global_step=global_step, validation=validation)
            self._emit_started(len(specs), global_step, validation)
            thread.call_soon(partial(call.add, specs))

        close, abandon = partial(thread.call_soon, call.feed.close), partial(thread.call_soon, call.abandon)
        return TaskFeed(finished, episodes, self.plan.count(validation), add, close, abandon)

    @property
    def unfinished(self) -> tuple[UnfinishedEpisode, ...]:
        """
        The episodes that were interrupted or aborted so far and have not been resumed since.

        Episodes that `min_fraction` interrupted are only here; those of an `abort` are also results, as `aborted`.
        """
        return self._unfinished.all()

    def stats(self) -> dict[str, int]:
        """
        Return the number of episodes by status, and the number of recoveries.

        Returns:
            `completed`, `truncated`, `timed_out`, `aborted` and `failed` episodes, and how many were `interrupted` by
            `min_fraction`, `resumed`, and `dropped` by the prompt policy. Under Ray also `retried` episodes of dead
            workers, `quarantined` ones that killed them, `worker_restarts`, `replica_restarts`, `migrations`: requests
            that another replica ran than the one before of their episode, `resent` requests of dead replicas, and
            `picture_bytes` that the workers and replicas that live now received as pictures.
        """
        thread = self._thread
        recoveries = thread.call(self.runtime.counts()) if thread is not None else {}
        others = {name: self._counts[name] for name in ("interrupted", "resumed", "dropped")}
        return {str(status): self._counts[status] for status in Status} | recoveries | others

    def forget(self, unfinished: Iterable[UnfinishedEpisode]) -> None:
        """Drop some unfinished episodes; unknown ones are ignored."""
        self._unfinished.forget(unfinished)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the engine; known once it has started."""
        return self.runtime.capabilities

    @property
    def addresses(self) -> dict[str, dict[str, str]]:
        """Addresses of the agents' servers by worker and name; empty when no agent has servers."""
        return self._running_thread().call(self.runtime.addresses())

    def abort(self) -> Future[None] | None:
        """
        Stop every running episode soon and close every task feed; the calls that wait for them return.

        The future is done when the abort has reached all episodes: later ones continue. None if nothing runs. Do not
        wait for it in a signal handler.
        """
        thread = self._thread  # another thread may stop the manager meanwhile
        return thread.submit(self._abort()) if thread else None

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the runtime's event loop, beside the episodes of this process, and return its result."""
        return self._running_thread().call(work)

    def collate(self, results: Sequence[EpisodeResult]) -> RolloutBatch:
        """Return the batch of some episodes, with the fields of the postprocessors."""
        return self.plan.pad(build_rows(results))

    def collate_packed(self, results: Sequence[EpisodeResult]) -> PackedBatch:
        """Return the batch of some episodes without pads, with the fields of the postprocessors."""
        return self.plan.pack(build_rows(results))

    def _launch(self, call: RolloutCall, finished: FinishedEpisodes) -> Future[None]:
        """Start a call; its episodes, and then an error or the end, come to `finished` from the runtime's thread."""
        running = self._running_thread().submit(self._run(call, finished))
        # Also when the loop breaks, and `_run` with it. A second error has no reader.
        running.add_done_callback(lambda done: finished.put(None if done.cancelled() else done.exception()))
        return running

    def _emit_started(self, num_episodes: int, global_step: int, validation: bool) -> None:
        event = RunStarted(num_episodes=num_episodes, global_step=global_step, validation=validation)
        self.observers.emit("on_run_started", event)

    def _running_thread(self) -> LoopThread:
        if self._thread is None:
            raise TurnwiseError("the manager is not running: use it in a with statement, or call start()")
        return self._thread

    async def _run(self, call: RolloutCall, finished: FinishedEpisodes) -> None:
        """Run episodes on the runtime's loop; put None at the end, after the exception if there was one."""
        self._calls[call] = None
        self._reports.num_calls = len(self._calls)
        try:
            if self.groups is None:
                call.feed.deliver_ended(call.deliver)
            run = partial(self.groups.run, self.runtime) if self.groups else self.runtime.run
            await run(call.feed, call.deliver, call.interrupt)
        except BaseException as error:  # a cancellation too, or the caller would wait for ever
            finished.put(error)
            raise
        finally:
            self._calls.pop(call, None)
            self._reports.num_calls = len(self._calls)
            finished.put(None)

    async def _abort(self) -> None:
        # First, because a runtime starts every task that it takes from a feed.
        for call in tuple(self._calls):
            call.end()
        await self.runtime.abort()

    def _keep(self, unfinished: UnfinishedEpisode) -> None:
        with self._lock:
            self._counts["interrupted"] += 1
        self._unfinished.add(unfinished)

    def _accept(self, item: tuple[int, EpisodeResult] | BaseException) -> tuple[int, EpisodeResult] | None:
        """Count a result for the caller; by the prompt policy, a long prompt ends the run or is left out."""
        if isinstance(item, BaseException):
            raise item
        result, fault = item[1], item[1].fault
        too_long = fault is not None and fault.kind == PromptTooLongError.__name__
        dropped = too_long and self.plan.prompt_policy == "drop"
        with self._lock:
            self._counts["dropped" if dropped else result.status] += 1
        if result.unfinished is not None:
            self._unfinished.add(result.unfinished)
        if fault is None or not too_long:
            return item
        if dropped:
            structlog.get_logger().warning("episode dropped", episode=result.uid, reason=fault.message)
            return None
        # The other episodes would run to their end, for a caller that has left with the exception.
        self.abort()
        raise PromptTooLongError(fault.message)
