"""
The states in which engines and a trainer share device memory, and the transitions between them, as data.

The tables declare which call is legal in which state, its steps, and how a failed step is undone.
`turnwise.weights.memory` executes them and adds no rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal

from attrs import frozen

Call = Literal["to_training", "to_rollout", "to_sleep", "recover"]


class SwitchState(StrEnum):
    """
    The side that has the device memory.

    In `handover` the engines sleep, and only the trainer's parameters are on the device. In `broken` the contents of
    the device are unknown.
    """

    ROLLOUT = "rollout"
    ASLEEP = "asleep"
    TRAINING = "training"
    HANDOVER = "handover"
    BROKEN = "broken"


class Stage(StrEnum):
    """An action that allocates or frees memory, or updates the weights."""

    SLEEP = "sleep"
    ONLOAD = "onload"
    OFFLOAD_OPTIMIZER = "offload_optimizer"
    WAKE_WEIGHTS = "wake_up_weights"
    SYNC = "sync_weights"
    OFFLOAD_PARAMETERS = "offload_parameters"
    WAKE_KV_CACHE = "wake_up_kv_cache"


@frozen
class Step:
    """A stage within a transition, the stages after its failure in order, and the safe state after these."""

    stage: Stage
    undo: tuple[Stage, ...]
    safe: SwitchState


@frozen
class Transition:
    """Effect of a call in a state: its steps in order, and the state after the last one."""

    steps: tuple[Step, ...]
    target: SwitchState


_S, _A = SwitchState, Stage
# After a failure the engines may have freed any part, so all of it is restored.
_SLEEP: Final = Step(_A.SLEEP, (_A.WAKE_WEIGHTS, _A.WAKE_KV_CACHE), _S.ROLLOUT)
_ONLOAD: Final = Step(_A.ONLOAD, (_A.OFFLOAD_OPTIMIZER, _A.OFFLOAD_PARAMETERS), _S.ASLEEP)
_OFFLOAD_OPTIMIZER: Final = Step(_A.OFFLOAD_OPTIMIZER, (), _S.TRAINING)
_OFFLOAD_PARAMETERS: Final = Step(_A.OFFLOAD_PARAMETERS, (), _S.HANDOVER)
_WAKE_KV_CACHE: Final = Step(_A.WAKE_KV_CACHE, (_A.SLEEP,), _S.ASLEEP)
# The trainer's parameters stay until the engines have the new weights, and the KV cache takes their memory last.
_HAND_OVER: Final = (
    Step(_A.WAKE_WEIGHTS, (_A.SLEEP,), _S.HANDOVER),
    Step(_A.SYNC, (_A.SLEEP,), _S.HANDOVER),
    Step(_A.OFFLOAD_PARAMETERS, (_A.SLEEP,), _S.HANDOVER),
    _WAKE_KV_CACHE,
)
_WAKE: Final = (Step(_A.WAKE_WEIGHTS, (_A.SLEEP,), _S.ASLEEP), Step(_A.SYNC, (_A.SLEEP,), _S.ASLEEP), _WAKE_KV_CACHE)
# No step can be undone here: the state is unknown already.
_RECOVER: Final = tuple(Step(stage, (), _S.BROKEN) for stage in (_A.SLEEP, _A.OFFLOAD_OPTIMIZER, _A.OFFLOAD_PARAMETERS))

TRANSITIONS: Final[Mapping[tuple[SwitchState, Call], Transition]] = {
    (_S.ROLLOUT, "to_training"): Transition((_SLEEP, _ONLOAD), _S.TRAINING),
    (_S.ROLLOUT, "to_sleep"): Transition((_SLEEP,), _S.ASLEEP),
    (_S.ASLEEP, "to_training"): Transition((_ONLOAD,), _S.TRAINING),
    (_S.ASLEEP, "to_rollout"): Transition(_WAKE, _S.ROLLOUT),
    (_S.TRAINING, "to_rollout"): Transition((_OFFLOAD_OPTIMIZER, *_HAND_OVER), _S.ROLLOUT),
    (_S.TRAINING, "to_sleep"): Transition((_OFFLOAD_OPTIMIZER, _OFFLOAD_PARAMETERS), _S.ASLEEP),
    (_S.HANDOVER, "to_training"): Transition((_ONLOAD,), _S.TRAINING),
    (_S.HANDOVER, "to_rollout"): Transition(_HAND_OVER, _S.ROLLOUT),
    (_S.HANDOVER, "to_sleep"): Transition((_OFFLOAD_PARAMETERS,), _S.ASLEEP),
    (_S.BROKEN, "recover"): Transition(_RECOVER, _S.ASLEEP),
}
"""Every legal call by the state in which it is legal. Engines and trainer use the same devices by turns."""
