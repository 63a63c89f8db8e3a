"""Calls of Ray actors by the driver: the first reply of a new actor, pings, and the end of an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, NoReturn, TypeVar

import structlog

from turnwise.config.runtime import RayConfig
from turnwise.errors import EngineError
from turnwise.runtime.remote.actor_calls import ActorHandle
from turnwise.runtime.remote.supervision import ActorSlot, failure_reason

_Reply = TypeVar("_Reply")

STOP_S: Final = 10.0
"""Seconds for an actor to stop by itself."""

DRIVER_CALL_S: Final = 0.002
"""
Seconds of the driver for each call that it repeats on many actors: a call takes it about 0.6 ms, so with these pauses
pings and collections together leave time for the episodes, however many actors there are.
"""


def node_address() -> str:
    """Return the address of this machine for the other machines of the cluster."""
    import ray

    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray has no annotation
    return host


def kill(handle: Any) -> None:
    """End an actor at once."""
    import ray

    ray.kill(handle)


def kill_actor(slot: ActorSlot) -> bool:
    """Kill the actor of a slot and empty the slot; return False if it was empty."""
    handle, slot.handle = slot.handle, None
    if handle is not None:
        kill(handle)
    return handle is not None


async def first_reply(handle: ActorHandle, reference: Awaitable[_Reply], timeout_s: float) -> _Reply:
    """Return the first reply of a new actor; kill the actor if it fails or is late."""
    # Ray starts actors in the background, so an error of the constructor arrives here too.
    try:
        async with asyncio.timeout(timeout_s):
            return await reference
    except TimeoutError:
        kill(handle)
        raise TimeoutError(f"it did not start within {timeout_s:g} s") from None
    except BaseException:
        kill(handle)
        raise


async def wait_for_stop(reference: Awaitable[object], timeout_s: float) -> None:
    """Wait for the reply of an actor that stops; a dead actor never replies."""
    try:
        async with asyncio.timeout(timeout_s):
            await reference
    except Exception as error:  # noqa: BLE001 - the actor is killed next, so its error has no consequence
        structlog.get_logger().debug("actor did not stop by itself", reason=failure_reason(error))


async def run_to_end(work: Coroutine[object, object, None]) -> None:
    """Run a coroutine; a cancellation of the caller does not reach it, and is raised when it has ended."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def watch_with_pings(
    slot: ActorSlot,
    watch: Awaitable[object],
    options: RayConfig,
    finish: Callable[[ActorSlot], Awaitable[None]],
    *others: Coroutine[object, object, NoReturn],
) -> None:
    """
    Wait until an actor's call of `watch` ends, which fails when the process dies; meanwhile ping, and run the others.

    When the actor must leave, `finish` waits until it has no more work.

    When this function returns or raises, none of its tasks runs any more, so nothing that the actor sent is handled
    later.

    Raises:
        ExceptionGroup: the actor died, left, or did not reply to a ping in time.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in (_ping(slot, options), _leave(slot, finish), *others)]
        # An error of either call cancels the other: the actor is dead for the driver, and its group kills the process.
        await watch
        for task in tasks:
            task.cancel()


async def _leave(slot: ActorSlot, finish: Callable[[ActorSlot], Awaitable[None]]) -> NoReturn:
    await slot.leaving.wait()
    with suppress(TimeoutError):
        async with asyncio.timeout_at(slot.leave_by):
            await finish(slot)
            # Not if work is left, which would end as aborted and not move.
            await wait_for_stop(slot.handle.stop.remote(), STOP_S)
    raise EngineError(slot.last_error)


async def _ping(slot: ActorSlot, options: RayConfig) -> NoReturn:
    while True:
        await asyncio.sleep(options.heartbeat_s)
        try:
            async with asyncio.timeout(options.heartbeat_timeout_s):
                await slot.handle.ping.remote()
        except TimeoutError:
            raise EngineError(f"did not reply for {options.heartbeat_timeout_s:g} s") from None


async def ask(slot: ActorSlot, method: str, timeout_s: float) -> dict[str, Any]:
    """Return the reply of an actor; empty if it is dead or late, which the task that watches it handles."""
    with suppress(Exception):
        async with asyncio.timeout(timeout_s):
            reply: dict[str, object] = await getattr(slot.handle, method).remote()
            return reply
    return {}
