"""
The states in which engines and a trainer share device memory, and the transitions between them, as data.

Which call is legal in which state, the steps that it takes, what is undone when a step fails, and what is on the device
meanwhile: `turnwise.memory` follows these tables and adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, Literal

from attrs import frozen

Call = Literal["to_training", "to_rollout", "to_sleep", "recover"]


class SwitchState(StrEnum):
    """
    Where memory is. In `handover` the engines sleep, and of the trainer the parameters alone are on the device; in
    `broken` nobody knows.
    """

    ROLLOUT = "rollout"
    ASLEEP = "asleep"
    TRAINING = "training"
    HANDOVER = "handover"
    BROKEN = "broken"


class Part(StrEnum):
    """What takes device memory."""

    ENGINE_WEIGHTS = "engine_weights"
    ENGINE_KV_CACHE = "engine_kv_cache"
    TRAINER_PARAMETERS = "trainer_parameters"
    TRAINER_OPTIMIZER = "trainer_optimizer"


class Stage(StrEnum):
    """The steps that switches are made of."""

    SLEEP = "sleep"
    ONLOAD = "onload"
    OFFLOAD_OPTIMIZER = "offload_optimizer"
    WAKE_WEIGHTS = "wake_up_weights"
    SYNC = "sync_weights"
    OFFLOAD_PARAMETERS = "offload_parameters"
    WAKE_KV_CACHE = "wake_up_kv_cache"


_ENGINE: Final = frozenset({Part.ENGINE_WEIGHTS, Part.ENGINE_KV_CACHE})
_TRAINER: Final = frozenset({Part.TRAINER_PARAMETERS, Part.TRAINER_OPTIMIZER})
TAKES: Final[Mapping[Stage, frozenset[Part]]] = {
    Stage.ONLOAD: _TRAINER,
    Stage.WAKE_WEIGHTS: frozenset({Part.ENGINE_WEIGHTS}),
    Stage.WAKE_KV_CACHE: frozenset({Part.ENGINE_KV_CACHE}),
}
"""What a stage brings to the device; it may be there before the stage has ended."""
FREES: Final[Mapping[Stage, frozenset[Part]]] = {
    Stage.SLEEP: _ENGINE,
    Stage.OFFLOAD_OPTIMIZER: frozenset({Part.TRAINER_OPTIMIZER}),
    Stage.OFFLOAD_PARAMETERS: frozenset({Part.TRAINER_PARAMETERS}),
}
"""What a stage takes off the device; it may be there until the stage has ended."""
HOLDS: Final[Mapping[SwitchState, frozenset[Part]]] = {
    SwitchState.ROLLOUT: _ENGINE,
    SwitchState.ASLEEP: frozenset(),
    SwitchState.TRAINING: _TRAINER,
    SwitchState.HANDOVER: frozenset({Part.TRAINER_PARAMETERS}),
}
"""What is on the device between two calls, in hybrid mode."""


@frozen
class Step:
    """
    A stage within a transition.

    Attributes:
        stage: what is done.
        undo: what is done when it fails.
        safe: the state after that.
    """

    stage: Stage
    undo: tuple[Stage, ...]
    safe: SwitchState


@frozen
class Transition:
    """
    What a call does in a state.

    Attributes:
        steps: in order.
        target: the state after the last.
    """

    steps: tuple[Step, ...]
    target: SwitchState


_S, _A = SwitchState, Stage
_LULL: Final = Step(_A.SLEEP, (_A.WAKE_WEIGHTS, _A.WAKE_KV_CACHE), _S.ROLLOUT)
_ONLOAD: Final = Step(_A.ONLOAD, (_A.OFFLOAD_OPTIMIZER, _A.OFFLOAD_PARAMETERS), _S.ASLEEP)
_OFFLOAD_OPTIMIZER: Final = Step(_A.OFFLOAD_OPTIMIZER, (), _S.TRAINING)
_OFFLOAD_PARAMETERS: Final = Step(_A.OFFLOAD_PARAMETERS, (), _S.HANDOVER)
_WAKE_KV_CACHE: Final = Step(_A.WAKE_KV_CACHE, (_A.SLEEP,), _S.ASLEEP)
_HAND_OVER: Final = (
    Step(_A.WAKE_WEIGHTS, (_A.SLEEP,), _S.HANDOVER),
    Step(_A.SYNC, (_A.SLEEP,), _S.HANDOVER),
    Step(_A.OFFLOAD_PARAMETERS, (_A.SLEEP,), _S.HANDOVER),
    _WAKE_KV_CACHE,
)
_WAKE: Final = (Step(_A.WAKE_WEIGHTS, (_A.SLEEP,), _S.ASLEEP), Step(_A.SYNC, (_A.SLEEP,), _S.ASLEEP), _WAKE_KV_CACHE)
_CALM: Final = tuple(Step(stage, (), _S.BROKEN) for stage in (_A.SLEEP, _A.OFFLOAD_OPTIMIZER, _A.OFFLOAD_PARAMETERS))

TRANSITIONS: Final[Mapping[tuple[SwitchState, Call], Transition]] = {
    (_S.ROLLOUT, "to_training"): Transition((_LULL, _ONLOAD), _S.TRAINING),
    (_S.ROLLOUT, "to_sleep"): Transition((_LULL,), _S.ASLEEP),
    (_S.ASLEEP, "to_training"): Transition((_ONLOAD,), _S.TRAINING),
    (_S.ASLEEP, "to_rollout"): Transition(_WAKE, _S.ROLLOUT),
    (_S.TRAINING, "to_rollout"): Transition((_OFFLOAD_OPTIMIZER, *_HAND_OVER), _S.ROLLOUT),
    (_S.TRAINING, "to_sleep"): Transition((_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAMETERS), _S.ASLEEP),
    (_S.HANDOVER, "to_training"): Transition((_ONLOAD,), _S.TRAINING),
    (_S.HANDOVER, "to_rollout"): Transition(_HAND_OVER, _S.ROLLOUT),
    (_S.HANDOVER, "to_sleep"): Transition((_OFFLOAD_PARAMETERS,), _S.ASLEEP),
    (_S.BROKEN, "recover"): Transition(_CALM, _S.ASLEEP),
}
"""Hybrid mode: engines and trainer take turns on the same devices."""
STANDALONE: Final[Mapping[tuple[SwitchState, Call], Transition]] = {
    (_S.ROLLOUT, "to_training"): Transition((), _S.TRAINING),
    (_S.TRAINING, "to_rollout"): Transition((Step(_A.SYNC, (), _S.TRAINING),), _S.ROLLOUT),
}
"""Standalone mode: each has devices of its own, so nothing sleeps; new weights are all that is handed over."""


def peak_bytes(sizes: Mapping[Part, int]) -> int:
    """Return the most bytes that hybrid mode has on a device at any time, on every legal path, undoing included."""
    return max(sum(sizes.get(part, 0) for part in held) for held in _ever_held())


def _ever_held() -> Iterator[frozenset[Part]]:
    for (state, _call), transition in TRANSITIONS.items():
        if state is SwitchState.BROKEN:
            continue
        held = HOLDS[state]
        yield held
        for step in transition.steps:
            during = held | TAKES.get(step.stage, frozenset())
            for stage in (step.stage, *step.undo):
                yield during | TAKES.get(stage, frozenset())
                during -= FREES.get(stage, frozenset())
            held = (held | TAKES.get(step.stage, frozenset())) - FREES.get(step.stage, frozenset())
