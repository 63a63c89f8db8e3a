"""
The memory that the switch between engines and trainer takes on a device, derived from its declared transitions.

`peak_bytes` is a proof over the tables of `turnwise.weights.memory_states`: no legal path takes more, nor a failed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final

from turnwise.weights.memory_states import TRANSITIONS, Stage, SwitchState


class Part(StrEnum):
    """A consumer of device memory."""

    ENGINE_WEIGHTS = "engine_weights"
    ENGINE_KV_CACHE = "engine_kv_cache"
    TRAINER_PARAMETERS = "trainer_parameters"
    TRAINER_OPTIMIZER = "trainer_optimizer"


_ENGINE: Final = frozenset({Part.ENGINE_WEIGHTS, Part.ENGINE_KV_CACHE})
_TRAINER: Final = frozenset({Part.TRAINER_PARAMETERS, Part.TRAINER_OPTIMIZER})
ALLOCATES: Final[Mapping[Stage, frozenset[Part]]] = {
    Stage.ONLOAD: _TRAINER,
    Stage.WAKE_WEIGHTS: frozenset({Part.ENGINE_WEIGHTS}),
    Stage.WAKE_KV_CACHE: frozenset({Part.ENGINE_KV_CACHE}),
}
"""Memory that a stage allocates; it may be allocated before the stage has ended."""
FREES: Final[Mapping[Stage, frozenset[Part]]] = {
    Stage.SLEEP: _ENGINE,
    Stage.OFFLOAD_OPTIMIZER: frozenset({Part.TRAINER_OPTIMIZER}),
    Stage.OFFLOAD_PARAMETERS: frozenset({Part.TRAINER_PARAMETERS}),
}
"""Memory that a stage frees; it may be allocated until the stage has ended."""
HOLDS: Final[Mapping[SwitchState, frozenset[Part]]] = {
    SwitchState.ROLLOUT: _ENGINE,
    SwitchState.ASLEEP: frozenset(),
    SwitchState.TRAINING: _TRAINER,
    SwitchState.HANDOVER: frozenset({Part.TRAINER_PARAMETERS}),
}
"""Memory on the device between two calls."""


def peak_bytes(sizes: Mapping[Part, int]) -> int:
    """Return the peak memory over all legal paths, including undone steps."""
    return max(sum(sizes.get(part, 0) for part in held) for held in _held_sets())


def _held_sets() -> Iterator[frozenset[Part]]:
    for (state, _call), transition in TRANSITIONS.items():
        if state is SwitchState.BROKEN:
            continue
        held = HOLDS[state]
        yield held
        for step in transition.steps:
            # During a stage, both the memory that it allocates and the memory that it frees may be on the device.
            during = held | ALLOCATES.get(step.stage, frozenset())
            for stage in (step.stage, *step.undo):
                yield during | ALLOCATES.get(stage, frozenset())
                during -= FREES.get(stage, frozenset())
            held = (held | ALLOCATES.get(step.stage, frozenset())) - FREES.get(step.stage, frozenset())
