"""The Ray cluster of a run: connection, and names of actors."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, ClassVar, Final, TypeVar
from uuid import uuid4

from attrs import define, field

from turnwise.errors import ConfigError, EngineError, TurnwiseError
from turnwise.runtime.placement import parse_address
from turnwise.runtime.ray.actor_lines import print_log_lines_whole
from turnwise.runtime.ray.own_ray import END_S, OwnRay, call_within, end_ray
from turnwise.runtime.remote.actor_calls import ActorHandle
from turnwise.runtime.remote.supervision import ActorSlot
from turnwise.threads import in_thread

T = TypeVar("T")

Node = Mapping[str, Any]
"""A node of a cluster, as `ray.nodes` describes it."""

_AUTH_MODE: Final = "RAY_AUTH_MODE"
_NO_TOKEN: Final = (
    "runtime.ray: other machines may reach this cluster, which requires no token: whoever reaches it can run code; set"
    f" {_AUTH_MODE}=token for cluster and run (Ray 2.60 or later), or runtime.ray.trusted_network to true"
)

PROBE_TIMEOUT_S: Final = 5.0
"""Seconds that a cluster has to accept a connection. Ray itself retries for more than ten minutes."""

ANSWER_S: Final = 60.0
"""Seconds that Ray has to answer a question about the cluster."""


@define(eq=False)
class Cluster:
    """
    The use of a Ray cluster by one run.

    All runs of a process share one connection. The last of them closes it, unless it was open before the first.

    Attributes:
        trusted_network: use a cluster that other machines reach also if it requires no token.
        run_name: part of every actor's name; differs for every run.
    """

    address: str | None = None
    trusted_network: bool = False
    run_name: str = field(factory=lambda: uuid4().hex[:8])
    _connected: bool = field(default=False, init=False)
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_runs: ClassVar[int] = 0
    _opened: ClassVar[bool] = False
    _own: ClassVar[OwnRay | None] = None

    async def connect(self) -> None:
        """
        Connect to the cluster, or start one.

        Raises:
            ConfigError: with one line, if the cluster cannot be joined.
            EngineError: with one line, if Ray does not start on this machine.
        """
        await asyncio.to_thread(self._connect)

    def _connect(self) -> None:
        # Ray reads it when it is imported. It would show one of several similar lines, such as those of two episodes.
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        import ray

        # Runs of one process connect from threads of their managers, and Ray has one connection for the process.
        with Cluster._lock:
            if not ray.is_initialized():
                self._open()
                Cluster._opened = True
            print_log_lines_whole()
            Cluster._num_runs += 1
            self._connected = True

    def _open(self) -> None:

        exposed = not self.trusted_network and _is_exposed(self.address)
        if exposed and os.environ.get(_AUTH_MODE, "token").lower() != "token":
            raise ConfigError(_NO_TOKEN)
        if self.address is not None:
            _check_reachable(self.address)
        # No code here needs the dashboard, and its agent costs more processor time than a small run. Without an address
        # Ray would join any cluster on this machine, also another user's.
        dashboard = None if self.address else False
        own = OwnRay()
        try:
            own.start(address=self.address or "local", namespace="turnwise", include_dashboard=dashboard)
            Cluster._own = own if self.address in (None, "local") else None
        except Exception as error:  # Ray raises its own errors and many built-in ones
            end_ray(own)  # everything that it has started so far
            raise _connection_error(self.address, error) from error
        # Ray sets the mode if it has found or made a token. Otherwise the cluster has let this process in without one.
        if exposed and os.environ.get(_AUTH_MODE, "").lower() != "token":
            end_ray(Cluster._own)
            raise ConfigError(_NO_TOKEN)

    def check_parts(self) -> None:
        """Raise `EngineError` if this process has started Ray and a part of it has ended."""
        own = Cluster._own if self._connected else None
        if own is not None and (name := own.dead_part()) is not None:
            raise EngineError(f"the {name} of Ray has ended, so the run ends; --resume continues a run in a folder")

    async def nodes(self) -> list[Node]:
        """Return the nodes of the cluster, as `ray.nodes` does."""
        import ray

        found: list[Node] = await call_ray(ray.nodes)
        return found

    async def close(self, release: Callable[[], None] = lambda: None, *, keep_files: bool = False) -> None:
        """
        Disconnect from the cluster, and end one that was started here. Idempotent.

        Args:
            release: frees the run's part of a cluster that stays.
            keep_files: keep the logs of a cluster that was started here.
        """
        # A daemon thread: a second interrupt must end the process also while Ray does not.
        await in_thread(self._close, {"release": release, "keep_files": keep_files})

    def _close(self, release: Callable[[], None], *, keep_files: bool) -> None:
        with Cluster._lock:
            if not self._connected:
                return
            self._connected = False
            Cluster._num_runs -= 1
            # A connection that the caller opened stays open.
            ends = Cluster._opened and Cluster._num_runs == 0
            _CALLS.wait(END_S)
            if not ends or Cluster._own is None:
                call_within(END_S, release)
            if ends:
                own, Cluster._own, Cluster._opened = Cluster._own, None, False
                end_ray(own, keep_files=keep_files)

    async def start_actor(
        self, kind: type, slot: ActorSlot, options: Mapping[str, object], *arguments: object, timeout_s: float
    ) -> ActorHandle:
        """
        Start an actor and return its handle. Its constructor may still run.

        Args:
            kind: class of the actor.
            slot: gives the actor its name.
            options: of the actor, as Ray takes them.
            arguments: of the constructor.
            timeout_s: seconds for Ray to accept the actor.

        Raises:
            TimeoutError: Ray does not answer.
        """
        import ray

        # A restarted actor needs a new name, because Ray may not have released the old one yet.
        name = f"turnwise-{self.run_name}-{slot.name.replace(' ', '-')}-{slot.num_starts}"
        # Task events would make the head node keep a record of every message, up to a hundred thousand.
        actor: Any = ray.remote(kind).options(name=name, max_restarts=0, enable_task_events=False, **options)
        handle: ActorHandle = await call_ray(partial(actor.remote, *arguments), timeout_s)
        return handle


async def call_ray(function: Callable[[], T], timeout_s: float = ANSWER_S) -> T:
    """
    Return the result of a function that waits for Ray's GCS, which may have stopped or died.

    The function runs in a daemon thread, so neither the event loop nor the end of this process waits for it. It goes
    through after a timeout or a cancellation if the GCS answers later. An actor that it starts then is ended by Ray,
    because no one holds its handle.

    Raises:
        TimeoutError: after `timeout_s` seconds.
    """

    def call() -> T:
        try:
            return function()
        finally:
            _CALLS.end()

    _CALLS.begin()
    try:
        async with asyncio.timeout(timeout_s):
            return await in_thread(call, {})
    except TimeoutError:
        raise TimeoutError(f"Ray did not answer within {timeout_s:g} s") from None


@define(eq=False)
class _Calls:
    """Counts the calls of Ray in threads: if Ray ended meanwhile, its C++ code would abort this process."""

    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _number: int = field(default=0, init=False)

    def begin(self) -> None:
        with self._changed:
            self._number += 1

    def end(self) -> None:
        with self._changed:
            self._number -= 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until no call runs, at most for some seconds: Ray may never answer."""
        with self._changed:
            self._changed.wait_for(lambda: not self._number, seconds)


_CALLS: Final = _Calls()


async def draining_nodes() -> dict[str, float]:
    """Return the nodes that the cluster will remove, each with its deadline on the clock of the event loop."""
    import ray

    client: Any = ray.util.client.ray  # for addresses with `ray://`; it cannot ask for these nodes
    if client.is_connected():
        return {}
    # Only Ray's own libraries, such as Train, get drain notices, from this function. A deadline of 0 means none.
    found: dict[str, int] = await call_ray(ray._private.state.state.get_draining_nodes)  # noqa: SLF001 - Ray has no public one
    offset_s = asyncio.get_running_loop().time() - time.time()
    return {node: at_ms / 1000 + offset_s if at_ms else inf for node, at_ms in found.items()}


def _is_exposed(address: str | None) -> bool:
    """Return whether other machines may reach a cluster. Ray listens on every interface, also for one machine."""
    target = None if address is None else parse_address(address)
    if target is None:
        return True
    try:
        return not ipaddress.ip_address(target[0]).is_loopback
    except ValueError:
        return target[0] != "localhost"


def _check_reachable(address: str) -> None:
    """Raise `ConfigError` if no process accepts connections at the address of a cluster."""
    target = parse_address(address)
    if target is None:
        return
    try:
        socket.create_connection(target, PROBE_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        late = f"no connection within {PROBE_TIMEOUT_S:g} s"
        reason = late if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        where = address.removeprefix("ray://")
        raise ConfigError(f"runtime.ray.address: cannot connect to {where}: {reason}") from error


def _connection_error(address: str | None, error: BaseException) -> TurnwiseError:
    """Return a one-line error for an error of `ray.init`, with its line and the line of its first cause."""
    first = error
    while (earlier := first.__cause__ or (None if first.__suppress_context__ else first.__context__)) is not None:
        first = earlier
    reason = ": ".join(dict.fromkeys([_relevant_line(error), _relevant_line(first)]))
    if address in (None, "local"):
        return EngineError(f"Ray does not start on this machine: {reason}")
    return ConfigError(f"runtime.ray.address: cannot join the cluster at {address}: {reason}")


def _relevant_line(error: BaseException) -> str:
    """Return the first line of an error, or the last one if Ray has put a traceback into the text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if any(line.endswith("Traceback (most recent call last):") for line in lines) else 0]
