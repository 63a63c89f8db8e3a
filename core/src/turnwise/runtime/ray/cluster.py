"""The Ray cluster of a run: how it is reached, how actors are named on it, and how they end."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any, ClassVar, Final, NoReturn
from uuid import uuid4

import structlog
from attrs import define, field

from turnwise.config_runtime import RayConfig
from turnwise.errors import ConfigError, EngineError, TurnwiseError
from turnwise.runtime.placement import host_and_port
from turnwise.runtime.supervision import Seat, reason_of

PROBE_TIMEOUT_S: Final = 5.0
"""How long a cluster's address has to take a connection. Ray itself tries for more than ten minutes."""


@define(eq=False)
class Cluster:
    """
    One run's use of a Ray cluster.

    Runs of one process share its connection. Who opened it does not matter: it is closed when the last run of ours
    ends, unless it was there before the first.

    Attributes:
        address: of a running cluster; None starts one, `auto` finds one.
        run_name: part of every actor's name, different for every run.
    """

    address: str | None = None
    run_name: str = field(factory=lambda: uuid4().hex[:8])
    _connected: bool = field(default=False, init=False)
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_runs: ClassVar[int] = 0
    _opened: ClassVar[bool] = False

    async def connect(self) -> None:
        """
        Reach the cluster, or start one.

        Raises:
            ConfigError: the cluster cannot be joined; one line.
            EngineError: Ray does not start on this machine; one line.
        """
        await asyncio.to_thread(self._connect)

    def _connect(self) -> None:
        import ray

        with Cluster._lock:
            if not ray.is_initialized():
                self._open()
                Cluster._opened = True
            Cluster._num_runs += 1
            self._connected = True

    def _open(self) -> None:
        import ray

        if self.address is not None:
            _check_reachable(self.address)
        # Nothing of ours needs the dashboard, and its agent costs more processor time than a small run. Without
        # an address Ray would join any cluster that runs on this machine, whoever's it is.
        dashboard = None if self.address else False
        try:
            ray.init(address=self.address or "local", namespace="turnwise", include_dashboard=dashboard)
        except Exception as error:  # Ray raises errors of many classes, its own and built-in ones
            with suppress(Exception):
                ray.shutdown()  # what it has opened or started so far
            raise _refusal(self.address, error) from error

    async def nodes(self) -> list[dict[str, Any]]:
        """Return the cluster's nodes as `ray.nodes` does."""
        import ray

        found: list[dict[str, Any]] = await asyncio.to_thread(ray.nodes)
        return found

    async def close(self) -> None:
        """Let go of the cluster; harmless a second time."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        import ray

        with Cluster._lock:
            if not self._connected:
                return
            self._connected = False
            Cluster._num_runs -= 1
            if Cluster._opened and Cluster._num_runs == 0:
                Cluster._opened = False
                ray.shutdown()

    def actor(self, kind: type, seat: Seat, **options: Any) -> Any:
        """Return the class of an actor with its name and options; calling `remote` on it starts one."""
        import ray

        name = f"turnwise-{self.run_name}-{seat.name.replace(' ', '-')}-{seat.num_starts}"
        # The head node would keep what became of each message, up to a hundred thousand of them.
        return ray.remote(kind).options(name=name, max_restarts=0, enable_task_events=False, **options)

    @staticmethod
    def kill(handle: Any) -> None:
        """End an actor at once."""
        import ray

        ray.kill(handle)


def _check_reachable(address: str) -> None:
    """Connect to where a cluster should be, and hang up; `ConfigError` when nothing answers there."""
    place = host_and_port(address)
    if place is None:
        return
    try:
        socket.create_connection(place, PROBE_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        late = f"no connection within {PROBE_TIMEOUT_S:g} s"
        reason = late if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        where = address.removeprefix("ray://")
        raise ConfigError(f"runtime.ray.address: nothing answers at {where}: {reason}") from error


def _refusal(address: str | None, error: BaseException) -> TurnwiseError:
    """Return what to raise for an error of `ray.init`: its line, and that of the error that began it."""
    first = error
    while (earlier := first.__cause__ or (None if first.__suppress_context__ else first.__context__)) is not None:
        first = earlier
    reason = ": ".join(dict.fromkeys([_line_of(error), _line_of(first)]))
    if address in (None, "local"):
        return EngineError(f"Ray does not start on this machine: {reason}")
    return ConfigError(f"runtime.ray.address: cannot join the cluster at {address}: {reason}")


def _line_of(error: BaseException) -> str:
    """Return the first line of an error; the last where Ray has put a traceback into the text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if any(line.endswith("Traceback (most recent call last):") for line in lines) else 0]


async def answer(reference: Any, timeout_s: float) -> None:
    """Wait for an answer that may never come, from an actor that may be dead."""
    try:
        async with asyncio.timeout(timeout_s):
            await reference
    except Exception as error:  # noqa: BLE001 - it is being stopped; how it went down does not matter any more
        structlog.get_logger().debug("actor did not stop in order", reason=reason_of(error))


async def first_answer(handle: Any, reference: Any, timeout_s: float) -> Any:
    """Wait for what a new actor answers; one that fails or is late is killed."""
    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except TimeoutError:
        Cluster.kill(handle)
        raise TimeoutError(f"it did not start within {timeout_s:g} s") from None
    except BaseException:
        Cluster.kill(handle)
        raise


async def ping(seat: Seat, options: RayConfig) -> NoReturn:
    """Ping an actor for ever; `EngineError` when it does not answer in time."""
    while True:
        await asyncio.sleep(options.heartbeat_s)
        try:
            async with asyncio.timeout(options.heartbeat_timeout_s):
                await seat.handle.ping.remote()
        except TimeoutError:
            raise EngineError(f"did not answer for {options.heartbeat_timeout_s:g} s") from None
