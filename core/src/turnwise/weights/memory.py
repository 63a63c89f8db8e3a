"""
Handing device memory to and fro between engines and a trainer: the one place that puts engines to sleep and wakes them.

What may happen stands in `turnwise.memory_states` as data: in which state which call is legal, the steps that it takes,
and what is undone when a step fails. `MemorySwitch` does nothing but follow them.

`EngineMemory` is the same for a single engine: it stands beside each replica's engine, in the process of that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, Protocol

from attrs import define, field, frozen

from turnwise.errors import EngineError, TurnwiseError
from turnwise.memory_states import STANDALONE, TRANSITIONS, Call, Stage, Step, SwitchState, Transition
from turnwise.observer import MemorySwitched, unix_s
from turnwise.protocols import Engine
from turnwise.telemetry import Observers
from turnwise.weights import UpdateReport, Weight

TAGS: Final = ("weights", "kv_cache")
Mode = Literal["hybrid", "standalone"]


class SwitchError(TurnwiseError):
    """
    A switch could not be made: the call is not legal in this state, or a stage of it failed.

    Attributes:
        state: where the switch stands now, which is safe unless it is `broken`.
        stage: what failed; empty for an illegal call.
    """

    def __init__(self, text: str, state: SwitchState, stage: str = "") -> None:
        super().__init__(text)
        self.state = state
        self.stage = stage


class TrainerMemory(Protocol):
    """
    The trainer's side. Every method is idempotent, and waits until the memory is given back or taken.

    A trainer that can tell has `memory_bytes() -> int` as well, and reports then say what each stage freed.
    """

    def offload_optimizer(self) -> None:
        """Move the optimizer's state, and gradients, off the device."""

    def offload_parameters(self) -> None:
        """Move the parameters off the device."""

    def onload(self) -> None:
        """Bring parameters and optimizer state back."""


class EngineSide(Protocol):
    """The engines' side; `turnwise.RolloutManager` is one."""

    def sleep(self, level: int = 1) -> None:
        """Free the memory of every replica."""

    def wake_up(self, tags: tuple[str, ...] = TAGS) -> None:
        """Take the memory of these tags again."""

    def update_weights(self, weights: Any, *, version: int | None = None) -> UpdateReport:
        """Bring new weights to every replica."""

    def memory_bytes(self) -> int:
        """Return what the replicas hold; 0 when they cannot tell."""


@frozen(kw_only=True)
class StageReport:
    """
    What one stage did.

    Attributes:
        stage: which.
        seconds: that it took.
        engine_bytes: held by the engines before and after; 0 when they cannot tell.
        trainer_bytes: held by the trainer before and after; 0 when it cannot tell.
    """

    stage: Stage
    seconds: float
    engine_bytes: tuple[int, int] = (0, 0)
    trainer_bytes: tuple[int, int] = (0, 0)


@frozen(kw_only=True)
class SwitchReport:
    """
    What one call did.

    Attributes:
        state: where the switch stands now.
        version: of the weights that the engines serve.
        stages: in order.
        update: of the weights, when there was one.
    """

    state: SwitchState
    version: int
    stages: tuple[StageReport, ...] = ()
    update: UpdateReport | None = None

    @property
    def seconds(self) -> float:
        """All stages together."""
        return sum(stage.seconds for stage in self.stages)


@define(eq=False)
class MemorySwitch:
    """
    The declared state machine. Calls of several threads take their turns; each runs to its end, or to a safe state.

    Attributes:
        engines: whose memory is switched.
        trainer: the other side.
        mode: `hybrid`, or `standalone` to hand over weights and nothing else.
        level: how deep engines sleep: 1 keeps their weights in host memory, 2 drops them.
        observers: who hears of every stage.
        state: where the switch stands.
        version: of the weights that the engines serve; raised when all stages of a switch have ended.
    """

    engines: EngineSide
    trainer: TrainerMemory
    mode: Mode = field(default="hybrid", kw_only=True)
    level: int = field(default=1, kw_only=True)
    observers: Observers = field(factory=Observers, kw_only=True)
    state: SwitchState = field(default=SwitchState.ROLLOUT, init=False)
    version: int = field(default=0, init=False)
    _lock: threading.RLock = field(factory=threading.RLock, init=False)
    _stages: list[StageReport] = field(factory=list, init=False)
    _update: UpdateReport | None = field(default=None, init=False)

    @property
    def legal_calls(self) -> tuple[Call, ...]:
        """What may be called in this state."""
        return tuple(call for state, call in self._table if state is self.state)

    def to_training(self) -> SwitchReport:
        """Put the engines to sleep and bring the trainer to the device; requests in flight end as by `abort`."""
        return self._make("to_training", ())

    def to_rollout(self, weights: Iterable[Weight] = ()) -> SwitchReport:
        """
        Hand the device to the engines, with new weights.

        Args:
            weights: all that `RolloutManager.update_weights` takes. None may be given out of `asleep` at level 1: the
                engines then serve what they served.
        """
        return self._make("to_rollout", weights)

    def to_sleep(self) -> SwitchReport:
        """Take everything off the device."""
        return self._make("to_sleep", ())

    def recover(self) -> SwitchReport:
        """Out of `broken`: try to take everything off the device."""
        return self._make("recover", ())

    # Inside

    @property
    def _table(self) -> Mapping[tuple[SwitchState, Call], Transition]:
        return TRANSITIONS if self.mode == "hybrid" else STANDALONE

    def _make(self, call: Call, weights: Any) -> SwitchReport:
        with self._lock:
            transition = self._table.get((self.state, call))
            if transition is None:
                legal = ", ".join(self.legal_calls) or "nothing"
                raise SwitchError(f"cannot call {call} in state {self.state}; legal: {legal}", self.state)
            no_weights = isinstance(weights, tuple) and not weights
            self._refuse_missing_weights(call, no_weights)
            self._stages, self._update = [], None
            for step in transition.steps:
                if not (step.stage is Stage.SYNC and no_weights):
                    self._follow(call, step, weights)
            self.state = transition.target
            self.version = self._update.version if self._update is not None else self.version
            return SwitchReport(state=self.state, version=self.version, stages=tuple(self._stages), update=self._update)

    def _refuse_missing_weights(self, call: Call, no_weights: bool) -> None:
        optional = self.state is SwitchState.ASLEEP and self.level == 1
        if call == "to_rollout" and no_weights and not optional:
            raise SwitchError(f"to_rollout in state {self.state} (sleep level {self.level}) needs weights", self.state)

    def _follow(self, call: Call, step: Step, weights: Any) -> None:
        try:
            self._run(step.stage, weights)
        except BaseException as error:
            self.state, undone = self._undo(step)
            where = "is now in no known state: call recover" if undone else f"is back in the safe state {self.state}"
            text = f"{call} failed at {step.stage}: {type(error).__name__}: {error}; memory {where}{undone}"
            if not isinstance(error, Exception):
                raise
            raise SwitchError(text, self.state, step.stage) from error

    def _undo(self, step: Step) -> tuple[SwitchState, str]:
        """Return the state after undoing a step, and what went wrong with that."""
        if step.stage is Stage.SLEEP and step.undo and self.level > 1:
            return SwitchState.BROKEN, " (sleep level 2 may have dropped weights)"
        for stage in step.undo:
            try:
                self._run(stage, ())
            except Exception as error:  # noqa: BLE001 - the first error is the one to raise; this one goes into its text
                return SwitchState.BROKEN, f" ({stage}: {type(error).__name__}: {error})"
        return step.safe, " (nothing could be done about it)" if step.safe is SwitchState.BROKEN else ""

    def _run(self, stage: Stage, weights: Any) -> None:
        actions: Mapping[Stage, Callable[[], Any]] = {
            Stage.SLEEP: lambda: self.engines.sleep(self.level),
            Stage.ONLOAD: self.trainer.onload,
            Stage.OFFLOAD_OPTIMIZER: self.trainer.offload_optimizer,
            Stage.WAKE_WEIGHTS: lambda: self.engines.wake_up(("weights",)),
            Stage.SYNC: lambda: self._sync(weights),
            Stage.OFFLOAD_PARAMETERS: self.trainer.offload_parameters,
            Stage.WAKE_KV_CACHE: lambda: self.engines.wake_up(("kv_cache",)),
        }
        with self._reported(stage):
            actions[stage]()

    def _sync(self, weights: Any) -> None:
        self._update = self.engines.update_weights(weights)

    @contextmanager
    def _reported(self, stage: Stage) -> Iterator[None]:
        before, started = self._bytes(), time.perf_counter()
        yield
        seconds, after = time.perf_counter() - started, self._bytes()
        report = StageReport(
            stage=stage, seconds=seconds, engine_bytes=(before[0], after[0]), trainer_bytes=(before[1], after[1])
        )
        self._stages.append(report)
        trainers = stage in (Stage.ONLOAD, Stage.OFFLOAD_OPTIMIZER, Stage.OFFLOAD_PARAMETERS)
        event = MemorySwitched(
            stage=stage,
            seconds=seconds,
            bytes_before=before[trainers],
            bytes_after=after[trainers],
            replica=-1 if trainers else 0,
            started_at=unix_s(started),
        )
        self.observers.emit("on_memory_switched", event)

    def _bytes(self) -> tuple[int, int]:
        tell = getattr(self.trainer, "memory_bytes", None)
        return self.engines.memory_bytes(), 0 if tell is None else tell()


@define(eq=False)
class EngineMemory:
    """
    One engine's sleep and wake, in the process of the engine: what is legal, one call after the other.

    Attributes:
        engine: started.
        level: how deep it sleeps; 0 when it is awake.
        awake: tags whose memory is there.
    """

    engine: Engine
    level: int = field(default=0, init=False)
    awake: frozenset[str] = field(default=frozenset(TAGS), init=False)
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def sleep(self, level: int) -> None:
        """Put the engine to sleep, or into a deeper one; again is harmless."""
        async with self._lock:
            levels = sorted(self.engine.capabilities.sleep_levels)
            if level not in levels:
                raise EngineError(f"the engine has no sleep level {level}; it has {levels or 'none'}")
            if self.awake or level > self.level:
                await self.engine.sleep(level)
                self.level, self.awake = max(level, self.level), frozenset()

    async def wake_up(self, tags: Iterable[str]) -> None:
        """Take memory again: the weights first, or both at once; again is harmless."""
        async with self._lock:
            asked = set(tags)
            wanted = tuple(tag for tag in TAGS if tag in asked)
            if unknown := asked - set(TAGS):
                raise EngineError(f"unknown memory tags {sorted(unknown)}; known: {', '.join(TAGS)}")
            if "kv_cache" in wanted and "weights" not in self.awake.union(wanted):
                raise EngineError(f"cannot wake up kv_cache: the engine is asleep (level {self.level}); first: weights")
            for tag in wanted:
                if tag not in self.awake:
                    await self.engine.wake_up((tag,))
                    self.awake |= {tag}
            if len(self.awake) == len(TAGS):
                self.level = 0

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """Bring weights; `EngineError` while their memory is asleep."""
        async with self._lock:
            if "weights" not in self.awake:
                raise EngineError(f"cannot update the weights: the engine is asleep (level {self.level})")
            await self.engine.update_weights(weights, version)
