"""Traces: workloads that the routing simulator replays."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

from attrs import Attribute, field, frozen, validators

at_least_0: Final = validators.ge(0)
at_least_1: Final = validators.ge(1)
finite_seconds: Final[Any] = [validators.ge(0), validators.lt(math.inf)]
more_than_0: Final[Any] = [validators.gt(0), validators.lt(math.inf)]


@frozen(kw_only=True)
class TraceTurn:
    """
    One turn of the model and the tool call after it.

    Attributes:
        num_new_tokens: sampled tokens.
        tool_s: seconds from the end of sampling to the start of the next turn, or to the end of the trajectory.
        num_observation_tokens: tokens that the tool's result adds to the context.
    """

    num_new_tokens: int = field(validator=at_least_1)
    tool_s: float = field(default=0.0, validator=finite_seconds)
    num_observation_tokens: int = field(default=0, validator=at_least_0)


@frozen(kw_only=True)
class TraceTrajectory:
    """
    One trajectory.

    Attributes:
        trajectory_id: unique in the trace.
        num_prompt_tokens: length of the prompt; all trajectories of a group share their prompt.
        turns: at least one.
        arrival_s: start time.
        group_id: trajectories of one group share the prompt; empty if no other trajectory has it.
    """

    trajectory_id: str = field(validator=validators.min_len(1))
    num_prompt_tokens: int = field(validator=at_least_1)
    turns: tuple[TraceTurn, ...] = field(validator=validators.min_len(1))
    arrival_s: float = field(default=0.0, validator=finite_seconds)
    group_id: str = ""


@frozen(kw_only=True)
class ReplicaEvent:
    """
    A change of one replica.

    Attributes:
        at_s: time of the change.
        replica: index from 0; the simulator ignores events of replicas that it does not have.
        speed: factor on all work of the replica from then on; 0.5 takes twice the time.
        available: false if the replica fails: it loses its cache, and its requests restart their turn elsewhere.
    """

    at_s: float = field(validator=finite_seconds)
    replica: int = field(validator=at_least_0)
    speed: float = field(default=1.0, validator=more_than_0)
    available: bool = True


@frozen(kw_only=True)
class Trace:
    """
    A workload to replay.

    Attributes:
        name: name in tables.
        trajectories: at least one, with unique ids.
        events: changes of replicas, in any order.
    """

    name: str
    trajectories: tuple[TraceTrajectory, ...] = field(validator=validators.min_len(1))
    events: tuple[ReplicaEvent, ...] = ()

    @trajectories.validator
    def _check_ids(self, _attribute: Attribute[Any], value: tuple[TraceTrajectory, ...]) -> None:
        name, times = Counter(each.trajectory_id for each in value).most_common(1)[0]
        if times > 1:
            raise ValueError(f"{times} trajectories have the id {name!r}; ids must be unique")
