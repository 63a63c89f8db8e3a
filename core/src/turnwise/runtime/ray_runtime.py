"""
The Ray runtime: workers and replicas are actors, supervised by the driver.

A replica that dies or stops answering is restarted with back-off while its requests go on elsewhere; a worker that dies
has its unfinished episodes run again. What happens to each episode stands in `turnwise.runtime.books`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

import structlog
from attrs import define, field

from turnwise.config_runtime import RayConfig, RuntimeConfig
from turnwise.episode_setup import EpisodeSpec
from turnwise.errors import EngineError
from turnwise.result import EpisodeResult
from turnwise.runtime.books import Books
from turnwise.runtime.ray_actors import Blueprint, ReplicaActor, WorkerActor
from turnwise.runtime.worker import Deliver
from turnwise.telemetry import Observers
from turnwise.types import Capabilities


@define(eq=False)
class _Seat:
    """The place of one replica or worker; who sits there changes with every restart."""

    kind: str
    index: int
    handle: Any = None
    restarts: int = 0
    lost: str = ""
    settled: asyncio.Event = field(factory=asyncio.Event)

    @property
    def name(self) -> str:
        """What texts and peers call it."""
        return f"{self.kind} {self.index}"


@define(eq=False)
class RayRuntime:
    """
    Runs episodes on a Ray cluster.

    Attributes:
        blueprint: what every process builds its parts from.
        config: how many of what, and where.
        observers: who hears of finished episodes in the driver.
        books: where every episode is.
    """

    blueprint: Blueprint
    config: RuntimeConfig = field(factory=lambda: RuntimeConfig(name="ray"))
    observers: Observers = field(factory=Observers)
    books: Books = field(init=False)
    _run_name: str = field(factory=lambda: uuid4().hex[:8], init=False)
    _replicas: list[_Seat] = field(init=False)
    _workers: list[_Seat] = field(init=False)
    _capabilities: Capabilities = field(factory=Capabilities, init=False)
    _supervision: asyncio.Task[None] | None = field(default=None, init=False)
    _stopping: bool = field(default=False, init=False)
    _owns_cluster: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with empty seats."""
        self.books = Books(self._options.max_kills)
        self._replicas = [_Seat("replica", index) for index in range(self.config.num_replicas)]
        self._workers = [_Seat("worker", index) for index in range(self.config.num_workers)]

    @property
    def _options(self) -> RayConfig:
        return self.config.ray

    async def start(self) -> None:
        """Connect and start every actor; `EngineError` says why one could not."""
        import ray

        if not ray.is_initialized():
            await asyncio.to_thread(_connect, self._options.address)
            self._owns_cluster = True
        self._supervision = asyncio.get_running_loop().create_task(self._supervise())
        for seat in (*self._replicas, *self._workers):
            await seat.settled.wait()
            if seat.handle is None:
                raise EngineError(f"{seat.name} could not be started: {seat.lost}")

    async def run(self, specs: Sequence[EpisodeSpec], deliver: Deliver) -> None:
        """Run every spec and deliver each exactly once."""
        ended = asyncio.Event()

        def announce(number: int, result: EpisodeResult) -> None:
            self.observers.emit("on_episode_finished", result)
            deliver(number, result)

        self.books.open(specs, announce, ended.set)
        alive = [seat for seat in self._workers if seat.handle is not None]
        if not alive:
            self.books.fail_all("every worker is dead")
        share = -(-len(specs) // max(1, len(alive)))
        for seat in alive:
            seat.handle.resume.options(num_returns=0).remote()
            self._give(seat, min(share, self._options.window))
        await ended.wait()

    async def abort(self) -> None:
        """End soon; `run` returns when every episode has been delivered."""
        for seat in self._workers:
            if seat.handle is not None:
                seat.handle.abort.options(num_returns=0).remote()

    async def stop(self) -> None:
        """Stop every actor, and the cluster when it was started here; harmless a second time."""
        import ray

        self._stopping = True
        for seat in (*self._workers, *self._replicas):
            if seat.handle is not None:
                await _answer(seat.handle.stop.remote(), 10.0)
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision], timeout=10)
            self._supervision = None
        for seat in (*self._workers, *self._replicas):
            if seat.handle is not None:
                ray.kill(seat.handle)
                seat.handle = None
        if self._owns_cluster:
            self._owns_cluster = False
            await asyncio.to_thread(ray.shutdown)

    async def stats(self) -> list[dict[str, float]]:
        """Return the numbers of every replica, then of every worker."""
        seats = [seat for seat in (*self._replicas, *self._workers) if seat.handle is not None]
        return [await seat.handle.stats.remote() for seat in seats]

    # Supervision

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as group:
            for seat in self._replicas:
                group.create_task(self._keep(seat, self._start_replica, self._attend_replica))
            for seat in self._replicas:
                await seat.settled.wait()
            for seat in self._workers:
                group.create_task(self._keep(seat, self._start_worker, self._attend_worker))

    async def _keep(
        self, seat: _Seat, start: Callable[[_Seat], Awaitable[Any]], attend: Callable[[_Seat, Any], Awaitable[None]]
    ) -> None:
        """Keep a seat taken: start, attend until it dies, and again with back-off, until it is given up."""
        while not self._stopping:
            try:
                watch = await start(seat)
                seat.settled.set()
                await attend(seat, watch)
            except Exception as error:  # noqa: BLE001 - whatever ends an actor ends only that actor
                seat.lost = _reason(error)
            if self._stopping:
                return
            self._vacate(seat)
            if seat.restarts >= self._options.max_restarts:
                self._give_up(seat)
                return
            wait_s = self._options.backoff_s * 2**seat.restarts
            seat.restarts += 1
            structlog.get_logger().warning(
                "actor lost", actor=seat.name, reason=seat.lost, restart=seat.restarts, wait_s=wait_s
            )
            await asyncio.sleep(wait_s)

    def _vacate(self, seat: _Seat) -> None:
        import ray

        handle, seat.handle = seat.handle, None
        if handle is not None:
            ray.kill(handle)
        if seat.kind == "worker":
            self.books.lose(seat.index, seat.lost)
            for other in self._live(self._workers):
                self._give(other, self._options.window)
        for worker in self._live(self._workers):
            if seat.kind == "replica":
                worker.handle.replica_down.options(num_returns=0).remote(seat.index, f"{seat.name}: {seat.lost}")
        for replica in self._live(self._replicas):
            if seat.kind == "worker":
                replica.handle.disconnect.options(num_returns=0).remote(seat.name)

    def _give_up(self, seat: _Seat) -> None:
        structlog.get_logger().error("actor given up", actor=seat.name, reason=seat.lost)
        seat.settled.set()
        if seat.kind == "worker" and not self._live(self._workers):
            self.books.fail_all(f"every worker is dead, the last: {seat.lost}")
        if seat.kind == "replica" and not self._live(self._replicas):
            for worker in self._live(self._workers):
                worker.handle.no_more_replicas.options(num_returns=0).remote(f"{seat.name}: {seat.lost}")

    @staticmethod
    def _live(seats: list[_Seat]) -> list[_Seat]:
        return [seat for seat in seats if seat.handle is not None]

    async def _start_replica(self, seat: _Seat) -> Any:
        handle = self._actor(ReplicaActor, seat).remote(self.blueprint, self._options.max_in_flight)
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                self._capabilities = await handle.start.remote()
        except BaseException:
            _kill(handle)
            raise
        watch = handle.watch.remote()
        seat.handle = handle
        for worker in self._live(self._workers):
            self._introduce(worker, seat)
        return watch

    async def _start_worker(self, seat: _Seat) -> Any:
        actor = self._actor(WorkerActor, seat)
        handle = actor.remote(seat.name, self.blueprint, self._capabilities, self.config.num_replicas)
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await handle.stats.remote()
        except BaseException:
            _kill(handle)
            raise
        watch = handle.watch.remote()
        seat.handle = handle
        for replica in self._live(self._replicas):
            self._introduce(seat, replica)
        self._give(seat, self._options.window)
        return watch

    def _actor(self, kind: type, seat: _Seat) -> Any:
        import ray

        options: dict[str, Any] = {"num_cpus": self._options.worker_cpus, "max_restarts": 0}
        if seat.kind == "replica":
            options = {"num_cpus": 0, "max_restarts": 0, **self._options.replica_resources}
            if self._options.replica_python is not None:
                options["runtime_env"] = {"py_executable": self._options.replica_python}
        return ray.remote(kind).options(name=f"turnwise-{self._run_name}-{seat.name}-{seat.restarts}", **options)

    @staticmethod
    def _introduce(worker: _Seat, replica: _Seat) -> None:
        # The replica knows the worker before it can hear from it: calls of one caller keep their order.
        replica.handle.connect.options(num_returns=0).remote(worker.name, worker.handle, replica.index)
        worker.handle.replica_up.options(num_returns=0).remote(replica.index, replica.handle)

    async def _attend_replica(self, seat: _Seat, watch: Any) -> None:
        async with asyncio.TaskGroup() as group:
            pings = group.create_task(self._ping(seat))
            await watch
            pings.cancel()

    async def _ping(self, seat: _Seat) -> None:
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            try:
                async with asyncio.timeout(self._options.heartbeat_timeout_s):
                    await seat.handle.ping.remote()
            except TimeoutError:
                text = f"did not answer for {self._options.heartbeat_timeout_s:g} s"
                raise EngineError(text) from None

    async def _attend_worker(self, seat: _Seat, watch: Any) -> None:
        async with asyncio.TaskGroup() as group:
            collecting = group.create_task(self._collect(seat))
            await watch
            collecting.cancel()

    async def _collect(self, seat: _Seat) -> None:
        while True:
            for key, result in await seat.handle.collect.remote():
                self.books.finish(seat.index, key, result)
            self._give(seat, self._options.window)

    def _give(self, seat: _Seat, most: int) -> None:
        if specs := self.books.take(seat.index, most):
            seat.handle.submit.options(num_returns=0).remote(specs)


def _connect(address: str | None) -> None:
    import ray

    # Nothing of ours needs the dashboard, and its agent costs more processor time than a small run.
    ray.init(address=address, namespace="turnwise", include_dashboard=None if address else False)


def _kill(handle: Any) -> None:
    import ray

    ray.kill(handle)


async def _answer(reference: Any, timeout_s: float) -> None:
    """Wait for an answer that may never come, from an actor that may be dead."""
    try:
        async with asyncio.timeout(timeout_s):
            await reference
    except Exception as error:  # noqa: BLE001 - it is being stopped; how it went down does not matter any more
        structlog.get_logger().debug("actor did not stop in order", reason=_reason(error))


def _reason(error: BaseException) -> str:
    """Return one line of an error, out of the task groups and Ray's own wrapping around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, BaseException) else error
    return f"{type(shown).__name__}: {str(shown).strip().splitlines()[0] if str(shown).strip() else ''}"
