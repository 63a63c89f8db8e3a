"""
Weight version and sleep state of a replica pool, including catch-up of restarted replicas.

A replica enters rotation only with the weights that the others serve. A replica whose update failed while others
succeeded is killed, so that it restarts and catches up. So is a replica with torn weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import structlog
from attrs import define, field

from turnwise.errors import EngineError, TornWeightsError
from turnwise.protocols.weights import TAGS, MemoryTag, UpdateReport, WeightSource
from turnwise.runtime.ray.calls import kill as kill_process
from turnwise.runtime.remote.actor_calls import ActorHandle
from turnwise.runtime.remote.supervision import ActorSlot, failure_reason, live
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise.weights.sleep import SleepState, drops_weights
from turnwise.weights.sources import Weights


@define(eq=False)
class GroupWeights:
    """
    The weights and the sleep state of one pool.

    `_lock` is held during an update, sleep and wake-up, and from the catch-up of a new replica to its entry into
    rotation. So during an update slots can only lose their actors, and a replica that has caught up is never outdated
    again before it serves.

    Attributes:
        updater: updates replicas; None without a transport, and `missing` is the error then.
        keep_last: keep the last weights for restarted replicas.
        version: of the last update that a replica applied; 0 for the weights that engines start with.
    """

    updater: WeightUpdater | None = None
    missing: str = "no weight transport is configured"
    keep_last: bool = True
    version: int = field(default=0, init=False)
    sleep_state: SleepState = field(factory=lambda: SleepState("the pool of replicas"), init=False)
    _outdated: dict[int, ActorHandle] = field(factory=dict, init=False)
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _changed: asyncio.Condition = field(init=False)

    def __attrs_post_init__(self) -> None:
        # Waiting on the condition releases the lock, so that an update can run, and acquires it again before it
        # returns.
        self._changed = asyncio.Condition(self._lock)

    async def update(
        self, slots: list[ActorSlot], weights: Weights, version: int, kill: Callable[[ActorSlot, str], None]
    ) -> UpdateReport:
        """
        Update every replica in rotation, and the restarted ones that wait for weights.

        If all replicas have died, the update waits for the first that is started again. `kill` kills a replica whose
        weights differ from the others, for a reason; it restarts and catches up.
        """
        if self.updater is None:
            raise EngineError(self.missing)
        async with self._lock:
            source = self.updater.make_source(weights)
            report = await self._update_live(self.updater, slots, source, version, kill)
            self.version = version
            failed = {each.replica: each.error for each in report.replicas if each.error}
            # A waiting replica that succeeded leaves this table, and `catch_up` continues when the lock is free.
            updated = {each.replica for each in report.replicas} - failed.keys()
            self._outdated = {index: each for index, each in self._outdated.items() if index not in updated}
            for slot in live(slots):
                if slot.index in failed:
                    kill(slot, f"it was not updated to weight version {version}: {failed[slot.index]}")
            self._changed.notify_all()
            return report

    async def _update_live(
        self,
        updater: WeightUpdater,
        slots: list[ActorSlot],
        source: WeightSource,
        version: int,
        kill: Callable[[ActorSlot, str], None],
    ) -> UpdateReport:
        dead: dict[int, ActorHandle] = {}
        waiting: dict[int, ActorHandle] = {}
        # A replica that has missed updates enters rotation only after an update of all weights.
        complete = updater.is_complete(source)

        def kill_replica(index: int, reason: str) -> None:
            if index in waiting:
                kill_process(waiting[index])
            for slot in live(slots):
                if slot.index == index:
                    kill(slot, reason)

        def is_decided() -> bool:
            started = any(slot.handle is not None and slot.handle is not dead.get(slot.index) for slot in slots)
            return started or (complete and bool(self._outdated)) or self._is_hopeless(slots)

        while True:
            # Without the lock, which a replica needs to enter rotation.
            await self._changed.wait_for(is_decided)
            handles = {slot.index: slot.handle for slot in live(slots)}
            waiting = dict(self._outdated) if complete else {}
            self._check_not_partial({**handles, **waiting})
            replicas = {i: handle.update_weights.remote for i, handle in {**handles, **waiting}.items()}
            try:
                return await updater.update(replicas, source, version, kill_replica, keep=self.keep_last)
            except TornWeightsError:
                raise  # these replicas were alive, and are killed
            except EngineError:
                # Dead actors fail before their supervision knows it. Others have refused these weights.
                if waiting or not handles or await _is_any_alive(handles.values()):
                    raise
                dead = handles

    def _is_hopeless(self, slots: list[ActorSlot]) -> bool:
        """Return whether no replica will enter rotation without an update of all weights."""
        # None starts while the pool sleeps, and one that waits for all weights does not enter with some of them.
        return self.sleep_state.level > 0 or all(slot.given_up or slot.index in self._outdated for slot in slots)

    def _check_not_partial(self, replicas: Collection[int]) -> None:
        """Raise `EngineError` if no replica takes an update, because all of them wait for all weights."""
        if self._outdated and not replicas:
            raise EngineError("every replica waits for all weights, and this update has some of them")

    async def notify_given_up(self) -> None:
        """Let an update look at the slots again: one of them stays empty."""
        async with self._lock:
            self._changed.notify_all()

    async def sleep(self, slots: list[ActorSlot], level: int, levels: Collection[int]) -> None:
        """Put every replica to sleep, at one of the `levels` they have; `EngineError` names the failed replicas."""
        async with self._lock:
            self.sleep_state.check_level(level, levels)
            # Also if a replica fails: one that starts later must not allocate memory that the trainer uses now.
            self.sleep_state.mark_asleep(level)
            await _call_all(slots, "sleep", level)

    async def wake_up(self, slots: list[ActorSlot], tags: Sequence[str]) -> None:
        """Restore memory of every replica; `EngineError` names the failed replicas."""
        async with self._lock:
            # All tags are passed on: after a failed wake-up some replicas may be awake already, which is harmless.
            woken = self.sleep_state.tags_to_wake(tags)
            await _call_all(slots, "wake_up", tuple(tags))
            self.sleep_state.mark_awake(*woken)
            self._changed.notify_all()

    async def wait_until_awake(self) -> None:
        """Wait while the pool sleeps: a replica that starts now would allocate memory that the trainer uses."""
        async with self._lock:
            await self._changed.wait_for(lambda: self.sleep_state.level == 0)

    async def catch_up(self, slot: ActorSlot, handle: ActorHandle, enter_rotation: Callable[[], None]) -> None:
        """
        Bring a new replica to the weights and the sleep state of the others.

        `enter_rotation` is called when the replica has caught up, before the next update starts.
        """
        async with self._lock:
            reached: tuple[int, frozenset[MemoryTag]] = (0, frozenset(TAGS))
            has_weights = False
            # The pool may have fallen asleep while the replica started, and may wake up while it waits for weights.
            while True:
                level, awake = wanted = self.sleep_state.level, self.sleep_state.awake
                # Weights come before a sleep that keeps them, or after a sleep that drops them. They come once, because
                # the kept updates start with older versions, to which an engine refuses to return.
                if not has_weights and "weights" in reached[1] and (reached == wanted or not drops_weights(level)):
                    await self._give_weights(slot, handle)
                    has_weights = True
                elif wanted == reached:
                    break
                else:
                    await _follow_sleep(handle, level, awake)
                    has_weights &= not drops_weights(level)
                    reached = wanted
            # Not a coroutine: it runs under the lock and without an await, so nothing changes before the slot is
            # filled.
            enter_rotation()
            self._changed.notify_all()

    async def _give_weights(self, slot: ActorSlot, handle: ActorHandle) -> None:
        """Bring a new replica to the last weights; if none are kept, wait for the next update, without the lock."""
        if not self.version or self.updater is None or await self._repeat(self.updater, slot.index, handle):
            return
        self._outdated[slot.index] = handle
        slot.settled.set()
        log = structlog.get_logger()
        log.warning("replica waits for the next weights", replica=slot.index, version=self.version)
        self._changed.notify_all()
        try:
            await self._changed.wait_for(lambda: slot.index not in self._outdated)
        finally:
            self._outdated.pop(slot.index, None)  # also if the replica is retired meanwhile

    @staticmethod
    async def _repeat(updater: WeightUpdater, index: int, handle: ActorHandle) -> bool:
        return await updater.repeat({index: handle.update_weights.remote}, lambda _index, _reason: kill_process(handle))

    async def close(self) -> None:
        """Free the kept weights, and the transport. Idempotent."""
        if self.updater is not None:
            await self.updater.forget()
            await self.updater.transport.close()


async def _follow_sleep(handle: ActorHandle, level: int, awake: frozenset[MemoryTag]) -> None:
    if level:
        await handle.sleep.remote(level)
    if awake:
        await handle.wake_up.remote(tuple(awake))


async def _is_any_alive(handles: Iterable[ActorHandle]) -> bool:
    for handle in handles:
        with suppress(Exception):
            await handle.ping.remote()
            return True
    return False


async def _call_all(slots: list[ActorSlot], method: str, argument: object) -> None:

    async def call(slot: ActorSlot) -> str:
        try:
            await getattr(slot.handle, method).remote(argument)
        except Exception as error:  # noqa: BLE001 - the errors of all replicas are raised together below
            return f"{slot.name}: {failure_reason(error)}"
        return ""

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call(slot)) for slot in live(slots)]
    if failed := [task.result() for task in tasks if task.result()]:
        raise EngineError(f"{method} failed: {'; '.join(failed)}")
