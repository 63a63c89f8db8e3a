"""
The switch of device memory between engines and a trainer that share devices.

`turnwise.weights.memory_states` declares as data which call is legal in which state, its steps, and how a failed step
is undone. `MemorySwitch` executes these tables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from attrs import define, field, frozen

from turnwise.errors import TurnwiseError
from turnwise.events.dispatch import Observers
from turnwise.events.observer import MemorySwitched, WeightsUpdated, unix_s
from turnwise.protocols.weights import TAGS, UpdateReport
from turnwise.weights.memory_states import TRANSITIONS, Call, Stage, Step, SwitchState
from turnwise.weights.sleep import drops_weights
from turnwise.weights.sources import Weights


class SwitchError(TurnwiseError):
    """
    A switch failed: the call is not legal in this state, or one of its stages failed.

    Attributes:
        state: of the switch after the error; safe unless it is `broken`.
        stage: the failed stage; empty for an illegal call.
    """

    def __init__(self, text: str, state: SwitchState, stage: str = "") -> None:
        super().__init__(text)
        self.state = state
        self.stage = stage


class TrainerMemory(Protocol):
    """
    Device memory of the trainer. Every method is idempotent, and returns when the memory is freed or allocated.

    A trainer may also have `memory_bytes() -> int`. Reports then contain the bytes that each stage freed.
    """

    def offload_optimizer(self) -> None:
        """Move the optimizer's state, and gradients, off the device."""

    def offload_parameters(self) -> None:
        """Move the parameters off the device."""

    def onload(self) -> None:
        """Move parameters and optimizer state to the device."""


class EngineSide(Protocol):
    """Device memory of the engines; `turnwise.RolloutManager` implements it and documents the methods."""

    def sleep(self, level: int = 1) -> None: ...
    def wake_up(self, tags: tuple[str, ...] = TAGS) -> None: ...
    def update_weights(self, weights: Weights, *, version: int | None = None) -> UpdateReport: ...
    def memory_bytes(self) -> int: ...


def _emit(
    observers: Observers, stage: str, started: float, seconds: float, num_bytes: tuple[int, int], replica: int = 0
) -> None:
    before, after, at = *num_bytes, unix_s(started)
    event = MemorySwitched(
        stage=stage, seconds=seconds, bytes_before=before, bytes_after=after, replica=replica, started_at=at
    )
    observers.emit("on_memory_switched", event)


@contextmanager
def report_stage(observers: Observers, stage: str, memory_bytes: Callable[[], int]) -> Iterator[None]:
    """Emit the event of a sleep or wake-up of engines that succeeds; `memory_bytes` counts their memory."""
    # The bytes are read outside of the measured time: a cluster needs a round trip for them.
    before, started = memory_bytes(), time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    _emit(observers, stage, started, seconds, (before, memory_bytes()))


def report_update(observers: Observers, report: UpdateReport, started: float) -> None:
    """Emit an event for each replica that was updated; `started` is a time of `time.perf_counter`."""
    event = partial(WeightsUpdated, version=report.version, num_bytes=report.num_bytes, started_at=unix_s(started))
    for each in report.replicas:
        if not each.error:
            observers.emit("on_weights_updated", event(seconds=each.seconds, replica=each.replica))


@frozen(kw_only=True)
class StageReport:
    """Duration of one stage, and the memory of engines and trainer before and after it; 0 bytes if unknown."""

    stage: Stage
    seconds: float
    engine_bytes: tuple[int, int] = (0, 0)
    trainer_bytes: tuple[int, int] = (0, 0)


@frozen(kw_only=True)
class SwitchReport:
    """Result of one call: the new state, the weight version of the engines, the stages in order, and the update."""

    state: SwitchState
    version: int
    stages: tuple[StageReport, ...] = ()
    update: UpdateReport | None = None

    @property
    def seconds(self) -> float:
        """Duration of all stages together."""
        return sum(stage.seconds for stage in self.stages)


@define(eq=False)
class MemorySwitch:
    """
    A state machine that moves device memory between engines and a trainer.

    Calls from several threads run one after the other. Each ends in the target state, in a safe state, or in `broken`.

    Attributes:
        engines: one side of the switch.
        trainer: the other side.
        level: sleep level of the engines: 1 keeps their weights in host memory, 2 drops them.
        observers: receive an event for every stage of the trainer and for the update of weights.
        state: current state.
        version: of the weights that the engines serve; changes when a switch has succeeded.
    """

    engines: EngineSide
    trainer: TrainerMemory
    level: int = field(default=1, kw_only=True)
    observers: Observers = field(factory=Observers, kw_only=True)
    state: SwitchState = field(default=SwitchState.ROLLOUT, init=False)
    version: int = field(default=0, init=False)
    _lock: threading.RLock = field(factory=threading.RLock, init=False)
    _stages: list[StageReport] = field(factory=list, init=False)
    _update: UpdateReport | None = field(default=None, init=False)

    @property
    def legal_calls(self) -> tuple[Call, ...]:
        """Calls that are legal in the current state."""
        return tuple(call for state, call in TRANSITIONS if state is self.state)

    def to_training(self) -> SwitchReport:
        """Put the engines to sleep and move the trainer to the device. Requests in flight end with `abort`."""
        return self._switch("to_training", ())

    def to_rollout(self, weights: Weights = ()) -> SwitchReport:
        """
        Give the device to the engines, with new weights: anything that `RolloutManager.update_weights` accepts.

        They may be omitted in state `asleep` at level 1: the engines then serve the same weights as before.
        """
        return self._switch("to_rollout", weights)

    def to_sleep(self) -> SwitchReport:
        """Free the device completely."""
        return self._switch("to_sleep", ())

    def recover(self) -> SwitchReport:
        """In state `broken`: try to free the device completely."""
        return self._switch("recover", ())

    def _switch(self, call: Call, weights: Weights) -> SwitchReport:
        # The lock covers the whole transition: between two stages the memory is in no state that another call may see.
        with self._lock:
            transition = TRANSITIONS.get((self.state, call))
            if transition is None:
                legal = ", ".join(self.legal_calls) or "nothing"
                raise SwitchError(f"cannot call {call} in state {self.state}; legal: {legal}", self.state)
            no_weights = isinstance(weights, tuple) and not weights
            # Before the first stage, so that a refused call changes nothing.
            self._check_weights(call, no_weights)
            self._stages, self._update = [], None
            for step in transition.steps:
                if not (step.stage is Stage.SYNC and no_weights):
                    self._run_step(call, step, weights)
            self.state = transition.target
            self.version = self._update.version if self._update is not None else self.version
            return SwitchReport(state=self.state, version=self.version, stages=tuple(self._stages), update=self._update)

    def _check_weights(self, call: Call, no_weights: bool) -> None:
        optional = self.state is SwitchState.ASLEEP and not drops_weights(self.level)
        if call == "to_rollout" and no_weights and not optional:
            raise SwitchError(f"to_rollout in state {self.state} (sleep level {self.level}) needs weights", self.state)

    def _run_step(self, call: Call, step: Step, weights: Weights) -> None:
        try:
            self._run_stage(step.stage, weights)
        except BaseException as error:
            self.state, failure = self._undo(step)
            where = "is now in an unknown state: call recover" if failure else f"is back in the safe state {self.state}"
            text = f"{call} failed at {step.stage}: {type(error).__name__}: {error}; memory {where}{failure}"
            # An interrupt is undone too, but passed on unchanged.
            if not isinstance(error, Exception):
                raise
            raise SwitchError(text, self.state, step.stage) from error

    def _undo(self, step: Step) -> tuple[SwitchState, str]:
        """Return the state after undoing a step, and why undoing it failed."""
        if step.stage is Stage.SLEEP and step.undo and drops_weights(self.level):
            # Waking up would succeed and serve whatever is in the memory of the dropped weights.
            return SwitchState.BROKEN, f" (sleep level {self.level} may have dropped weights)"
        for stage in step.undo:
            try:
                self._run_stage(stage, ())
            except Exception as error:  # noqa: BLE001 - the first error is raised; this one becomes part of its text
                return SwitchState.BROKEN, f" ({stage}: {type(error).__name__}: {error})"
        return step.safe, " (it cannot be undone)" if step.safe is SwitchState.BROKEN else ""

    def _run_stage(self, stage: Stage, weights: Weights) -> None:
        actions: Mapping[Stage, Callable[[], object]] = {
            Stage.SLEEP: lambda: self.engines.sleep(self.level),
            Stage.ONLOAD: self.trainer.onload,
            Stage.OFFLOAD_OPTIMIZER: self.trainer.offload_optimizer,
            Stage.WAKE_WEIGHTS: lambda: self.engines.wake_up(("weights",)),
            Stage.SYNC: lambda: self._update_weights(weights),
            Stage.OFFLOAD_PARAMETERS: self.trainer.offload_parameters,
            Stage.WAKE_KV_CACHE: lambda: self.engines.wake_up(("kv_cache",)),
        }
        with self._measured(stage):
            actions[stage]()

    def _update_weights(self, weights: Weights) -> None:
        self._update = self.engines.update_weights(weights)

    @contextmanager
    def _measured(self, stage: Stage) -> Iterator[None]:
        """Measure a stage that succeeds: append its report and emit its event."""
        before, started = self._bytes(), time.perf_counter()
        yield
        seconds, after = time.perf_counter() - started, self._bytes()
        engine_bytes, trainer_bytes = zip(before, after, strict=True)
        self._stages.append(
            StageReport(stage=stage, seconds=seconds, engine_bytes=engine_bytes, trainer_bytes=trainer_bytes)
        )
        # The engines emit the others themselves, so that a sleep without a switch is seen too.
        if stage is Stage.SYNC:
            _emit(self.observers, stage, started, seconds, engine_bytes)
        elif stage in (Stage.ONLOAD, Stage.OFFLOAD_OPTIMIZER, Stage.OFFLOAD_PARAMETERS):
            _emit(self.observers, stage, started, seconds, trainer_bytes, replica=-1)

    def _bytes(self) -> tuple[int, int]:
        return self.engines.memory_bytes(), getattr(self.trainer, "memory_bytes", int)()
