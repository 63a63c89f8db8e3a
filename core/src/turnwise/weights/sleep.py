"""
Sleep of an engine's memory: the state, the rules, and the only calls of `Engine.sleep` and `Engine.wake_up`.

At level 1 an engine frees its KV cache and keeps its weights in host memory, at level 2 it drops the weights too. It
wakes up in two steps, first the weights and then the KV cache, so that new weights can be loaded in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import structlog
from attrs import define, field

from turnwise.errors import AsleepError, EngineError
from turnwise.protocols import Engine
from turnwise.protocols.weights import TAGS, MemoryTag, Weight
from turnwise.weights.finishing import CancellableWeights, finish


def drops_weights(level: int) -> bool:
    """Whether a sleep level drops the weights, so that an engine needs new ones after waking up."""
    return level >= 2


@define(eq=False)
class SleepState:
    """
    The memory of an engine that sleeps, and the rules for sleep, wake-up and weight updates.

    An engine with an attribute `sleep_state` shares it with `EngineMemory`, so that its process has one state. Sleep,
    wake-up and update must not overlap, because each checks the state that another changes: their caller holds a lock.

    Attributes:
        name: subject of the error texts.
        level: 0 if requests may be served, else the deepest level since everything was awake.
        awake: tags whose memory is allocated.
    """

    name: str = "the engine"
    level: int = field(default=0, init=False)
    awake: frozenset[MemoryTag] = field(default=frozenset(TAGS), init=False)

    def check_serving(self) -> None:
        """Raise `AsleepError` unless requests may be served."""
        if self.level == 0:
            return
        asleep = [tag for tag in TAGS if tag not in self.awake]
        if not asleep:
            raise AsleepError(f"{self.name} is falling asleep (level {self.level})")
        raise AsleepError(f"{self.name} is asleep (level {self.level}): wake up {' and '.join(asleep)}")

    def check_level(self, level: int, levels: Collection[int], reason: str = "") -> None:
        """Raise `EngineError` for a level that is not among the engine's `levels`, with the reason if it has none."""
        if level not in levels:
            known = " and ".join(map(str, sorted(levels))) or f"none{reason and f': {reason}'}"
            raise EngineError(f"{self.name} has no sleep level {level}; it has {known}")

    def check_update(self) -> None:
        """Raise `EngineError` unless the memory of the weights is allocated."""
        if "weights" not in self.awake:
            raise EngineError(f"the weights of {self.name} are asleep: wake them up before an update")

    def frees_memory(self, level: int) -> bool:
        """Whether sleeping at a level frees any memory in this state."""
        return bool(self.awake) or level > self.level

    @contextmanager
    def falling_asleep(self, level: int) -> Iterator[None]:
        """
        Refuse requests at entry, and mark all memory as asleep at exit. Free the memory in between.

        After an error the state is as before, unless `mark_asleep` was called: then memory may have been freed.
        """
        # The level first: requests must be refused while those in flight are aborted, and before memory is freed.
        before = self.level, self.awake
        self.level = max(level, self.level)
        try:
            yield
        except BaseException:
            # Nothing was freed, so the engine can serve as before, and a retry must reach it again.
            if self.awake == before[1]:
                self.level = before[0]
            raise
        self.mark_asleep(level)

    def mark_asleep(self, level: int) -> None:
        self.level, self.awake = max(level, self.level), frozenset()

    def tags_to_wake(self, tags: Iterable[str]) -> tuple[MemoryTag, ...]:
        """
        Return the tags that are still asleep, in the order in which they wake up.

        Raises:
            EngineError: for an unknown tag, or for the KV cache before the weights: it would take their memory.
        """
        asked = set(tags)
        if unknown := sorted(asked.difference(TAGS)):
            raise EngineError(f"{self.name} cannot wake up {unknown[0]!r}, only {' and '.join(TAGS)}")
        wanted = tuple(tag for tag in TAGS if tag in asked and tag not in self.awake)
        if "kv_cache" in wanted and "weights" not in self.awake.union(wanted):
            raise EngineError(f"{self.name} cannot wake up kv_cache before weights: both are asleep")
        return wanted

    def mark_awake(self, *tags: MemoryTag) -> None:
        """Mark memory as allocated; with all of it, requests may be served again."""
        self.awake = self.awake.union(tags)
        if len(self.awake) == len(TAGS):
            self.level = 0


async def _announce_nothing() -> None:
    """Do nothing: no other process sends requests."""


@define(eq=False)
class EngineMemory:
    """
    Sleep, wake-up and weight updates of one engine, in its process. Calls run one after the other, and are idempotent.

    A call that is cancelled returns when the engine has finished it, because the next call must not find the engine in
    the middle of a change. Versions only rise: an update that comes after a newer one is refused.

    Attributes:
        engine: started.
        announce: tells the senders of requests that the engine falls asleep, or that all of it is awake.
        state: of the engine's memory; the engine's own `sleep_state` if it has one.
    """

    engine: Engine
    announce: Callable[[], Awaitable[None]] = _announce_nothing
    state: SleepState = field(init=False)
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _newest: int = field(default=0, init=False)
    _held: int | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        shared = getattr(self.engine, "sleep_state", None)
        self.state = shared if isinstance(shared, SleepState) else SleepState()

    async def sleep(self, level: int) -> None:
        async with self._lock:
            self.state.check_level(level, self.engine.capabilities.sleep_levels)
            if self.state.frees_memory(level):
                await finish(self._sleep(level))

    async def _sleep(self, level: int) -> None:
        with self.state.falling_asleep(level):
            # First the senders stop: a request that the engine aborts now would only be sent here again.
            await self.announce()
            if drops_weights(level):
                self._held = None
            await self.engine.sleep(level)

    async def wake_up(self, tags: Iterable[str]) -> None:
        async with self._lock:
            await finish(self._wake_up(tags))

    async def _wake_up(self, tags: Iterable[str]) -> None:
        # Marked one by one, so that after an error a retry restores only the rest.
        for tag in self.state.tags_to_wake(tags):
            await self.engine.wake_up((tag,))
            self.state.mark_awake(tag)
        # Also if nothing slept: after a failed sleep the senders still believe that the engine is asleep.
        if self.state.level == 0:
            await self.announce()

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """
        Update the engine; a cancelled update has changed all or nothing when this returns.

        Raises:
            EngineError: a newer update has started before, or the engine has this version already. The sender has given
                a late update up, and other replicas have newer weights by now.
        """
        self._refuse_late(version)
        self._newest = version
        # Under the lock, because a sleep would free the memory that an update writes.
        async with self._lock:
            # Again, because a newer update may have started meanwhile.
            self._refuse_late(version)
            self.state.check_update()
            source = CancellableWeights(weights)
            self._held = None
            await finish(self._update(source, version), on_cancel=source.cancel)

    async def _update(self, weights: Iterable[Weight], version: int) -> None:
        await self.engine.update_weights(weights, version)
        self._held = version

    def _refuse_late(self, version: int) -> None:
        if version < self._newest:
            reason = f"weight version {version} came after version {self._newest}"
        elif version == self._held:
            reason = f"weight version {version} came twice"
        else:
            return
        # Logged, because the sender may not wait for the reply any more.
        structlog.get_logger().warning("weights dropped", reason=reason, version=version)
        raise EngineError(f"{reason}, and was dropped")
