"""
Routers: which replica continues a trajectory.

Every router of this module is sticky: the turns of an episode go to one replica, whose prefix cache holds its context,
from the first request until `release`. They differ in where an episode goes first, and `least_tokens` also lets an
episode leave a replica that has become far busier than the rest. What follows the first slash of a trajectory id
(paths and further records of an episode, such as `abc/p1`) plays no part.

A router keeps its own small table and asks nobody anything, so a choice costs microseconds. It is not thread-safe;
each worker has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from math import inf
from typing import Any, Final
from zlib import crc32

from attrs import define, field, frozen, validators

from turnwise.errors import EngineError
from turnwise.protocols import ReplicaLoad, Resources, Router
from turnwise.registry import NoConfig
from turnwise.types import GenerateRequest


class Reason(StrEnum):
    """Why a replica was chosen."""

    STICKY = "sticky"
    FIRST = "first"
    PREFIX = "prefix"
    LEFT = "left"
    OVERLOADED = "overloaded"


@frozen
class Decision:
    """
    A choice, for the logs.

    Attributes:
        index: of the chosen replica.
        reason: `sticky`: the episode is at home there. `first`: it is new, and the router's rule chose. `prefix`: it
            is new, and its group's prompt is held there. `left`: its replica is not available any more.
            `overloaded`: its replica is, and this one is not.
    """

    index: int
    reason: Reason


class StickyRouter(ABC):
    """
    Keeps an episode where it is; a subclass says where one goes that is new or whose replica has left.

    Example:
        >>> router = RoundRobin()
        >>> router.decide(request, [ReplicaLoad(), ReplicaLoad()])  # doctest: +SKIP
        Decision(index=0, reason=<Reason.FIRST: 'first'>)
    """

    def __init__(self) -> None:
        self._home: dict[str, int] = {}

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the index of an available replica; `EngineError` when there is none."""
        return self.decide(request, replicas).index

    def decide(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> Decision:
        """Choose, and say why; `EngineError` when no replica is available."""
        key = episode_of(request.trajectory_id)
        home = self._home.get(key)
        if home is not None and home < len(replicas) and replicas[home].available:
            return Decision(home, Reason.STICKY)
        index = self._first(key, replicas)
        self._home[key] = index
        return Decision(index, Reason.FIRST if home is None else Reason.LEFT)

    def release(self, trajectory_id: str) -> None:
        """Forget an episode that has ended, with all its paths; unknown ids are ignored."""
        self._home.pop(episode_of(trajectory_id), None)

    def __len__(self) -> int:
        """How many episodes are at home somewhere."""
        return len(self._home)

    @abstractmethod
    def _first(self, key: str, replicas: Sequence[ReplicaLoad]) -> int:
        """Return an available replica for an episode that has none; `EngineError` when there is none."""


def episode_of(trajectory_id: str) -> str:
    """Return the part of a trajectory id that an episode's paths and records share: all before the first slash."""
    return trajectory_id.partition("/")[0]


def _none_available(num_replicas: int) -> EngineError:
    return EngineError(f"no replica is available: all {num_replicas} are dead, asleep or draining")


# The rules that others use, to compare with


class RoundRobin(StickyRouter):
    """New episodes go to the replicas in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def _first(self, key: str, replicas: Sequence[ReplicaLoad]) -> int:
        for step in range(len(replicas)):
            index = (self._next + step) % len(replicas)
            if replicas[index].available:
                self._next = index + 1
                return index
        raise _none_available(len(replicas))


class LeastRequests(StickyRouter):
    """New episodes go where the fewest requests are in flight; the first of equals."""

    def _first(self, key: str, replicas: Sequence[ReplicaLoad]) -> int:
        open_ones = [(load.num_requests, index) for index, load in enumerate(replicas) if load.available]
        if not open_ones:
            raise _none_available(len(replicas))
        return min(open_ones)[1]


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@frozen
class ConsistentHashConfig:
    """
    Options of `consistent_hash`.

    Attributes:
        points_per_replica: how finely the ring is cut; more points spread episodes more evenly.
    """

    points_per_replica: int = field(default=128, validator=[validators.ge(1), validators.le(65536)])


class ConsistentHash(StickyRouter):
    """
    The episode's id alone decides, so that workers that know nothing of each other agree.

    When a replica leaves, only its own episodes move (Karger et al., "Consistent Hashing and Random Trees", 1997). An
    episode that had to move stays where it went, also when its first replica comes back.
    """

    def __init__(self, config: ConsistentHashConfig | None = None) -> None:
        super().__init__()
        self._config = config or ConsistentHashConfig()
        self._rings: dict[int, tuple[list[int], list[int]]] = {}

    def _first(self, key: str, replicas: Sequence[ReplicaLoad]) -> int:
        points, owners = self._ring(len(replicas))
        start = bisect(points, _point(key))
        for step in range(len(owners)):
            index = owners[(start + step) % len(owners)]
            if replicas[index].available:
                return index
        raise _none_available(len(replicas))

    def _ring(self, num_replicas: int) -> tuple[list[int], list[int]]:
        if num_replicas not in self._rings:
            per_replica = self._config.points_per_replica
            cuts = sorted((_point(f"{i}/{k}"), i) for i in range(num_replicas) for k in range(per_replica))
            self._rings[num_replicas] = [point for point, _ in cuts], [index for _, index in cuts]
        return self._rings[num_replicas]


# Ours


@frozen(kw_only=True)
class LeastTokensConfig:
    """
    Options of `least_tokens`.

    Attributes:
        break_ratio: an episode may leave a replica whose tokens are more than this many times the mean.
        break_margin: and only when the gap to the least loaded is more than this many times its own context, which
            the new replica must prefill and then bear.
        prefix_slack: how much more than the least loaded a replica that holds the group's prompt may have and still
            be preferred, in lengths of the new context: what decoding beside so many more costs over a few hundred
            steps is of the order of what prefilling the prompt once more costs.
        resident_weight: how much a token of an episode at home counts besides those in flight: it will be back when
            its tool has answered.
    """

    break_ratio: float = field(default=1.25, validator=[validators.ge(1), validators.lt(inf)])
    break_margin: float = field(default=1.0, validator=[validators.ge(0), validators.lt(inf)])
    prefix_slack: float = field(default=10.0, validator=[validators.ge(0), validators.lt(inf)])
    resident_weight: float = field(default=0.5, validator=[validators.ge(0), validators.lt(inf)])


@define(eq=False)
class _Stay:
    """Where an episode is at home, what it weighs there, and whose prompt it shares."""

    index: int
    num_tokens: int
    group_id: str


class LeastTokens:
    """
    The least outstanding tokens, weighed against what the prefix caches hold.

    Tokens rather than requests, since contexts of one batch differ by more than an order of magnitude and a decode
    step reads them all. Nothing is forgotten before `release`: an episode that waits for a slow tool still finds its
    context.
    """

    def __init__(self, config: LeastTokensConfig | None = None) -> None:
        self._config = config or LeastTokensConfig()
        self._stays: dict[str, _Stay] = {}
        self._holders: dict[str, dict[int, int]] = {}
        self._resident: list[int] = []

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the index of an available replica; `EngineError` when there is none."""
        return self.decide(request, replicas).index

    def decide(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> Decision:
        """Choose, and say why; `EngineError` when no replica is available."""
        key = episode_of(request.trajectory_id)
        num_tokens = len(request.token_ids)
        loads = self._loads(replicas)
        stay = self._stays.get(key)
        if stay is None:
            decision = self._first(key, request.group_id, num_tokens, loads)
        else:
            decision = self._next(key, stay, num_tokens, loads)
            if decision.reason is Reason.STICKY:
                self._resident[stay.index] += num_tokens - stay.num_tokens
                stay.num_tokens = num_tokens
                return decision
            self._depart(stay)
        self._stays[key] = stay = _Stay(decision.index, num_tokens, request.group_id)
        self._arrive(stay)
        return decision

    def release(self, trajectory_id: str) -> None:
        """Forget an episode that has ended, with all its paths; unknown ids are ignored."""
        stay = self._stays.pop(episode_of(trajectory_id), None)
        if stay is not None:
            self._depart(stay)

    def __len__(self) -> int:
        """How many episodes are at home somewhere."""
        return len(self._stays)

    # Rules

    def _first(self, key: str, group_id: str, num_tokens: int, loads: list[float]) -> Decision:
        least = _least(key, loads)
        limit = loads[least] + self._config.prefix_slack * num_tokens
        held = [(loads[i], i) for i in self._holders.get(group_id, ()) if i < len(loads) and loads[i] <= limit]
        if held:
            return Decision(min(held)[1], Reason.PREFIX)
        return Decision(least, Reason.FIRST)

    def _next(self, key: str, stay: _Stay, num_tokens: int, loads: list[float]) -> Decision:
        home = stay.index
        if home >= len(loads) or loads[home] == inf:
            return Decision(self._first(key, stay.group_id, num_tokens, loads).index, Reason.LEFT)
        # What the episode itself weighs at home would come along.
        load = loads[home] - self._config.resident_weight * stay.num_tokens
        open_loads = [each for each in loads if each != inf]
        if load * len(open_loads) > self._config.break_ratio * sum(open_loads):
            least = _least(key, loads)
            if load - loads[least] > self._config.break_margin * num_tokens:
                return Decision(least, Reason.OVERLOADED)
        return Decision(home, Reason.STICKY)

    # The table

    def _loads(self, replicas: Sequence[ReplicaLoad]) -> list[float]:
        """Return a load in tokens per replica, infinite for those that are not available."""
        resident, weight = self._resident, self._config.resident_weight
        if len(resident) < len(replicas):
            resident += [0] * (len(replicas) - len(resident))
        return [
            replica.num_tokens + weight * tokens if replica.available else inf
            for replica, tokens in zip(replicas, resident, strict=False)
        ]

    def _arrive(self, stay: _Stay) -> None:
        self._resident[stay.index] += stay.num_tokens
        if stay.group_id:
            holders = self._holders.setdefault(stay.group_id, {})
            holders[stay.index] = holders.get(stay.index, 0) + 1

    def _depart(self, stay: _Stay) -> None:
        self._resident[stay.index] -= stay.num_tokens
        if stay.group_id:
            holders = self._holders[stay.group_id]
            holders[stay.index] -= 1
            if not holders[stay.index]:
                del holders[stay.index]
            if not holders:
                del self._holders[stay.group_id]


def _least(key: str, loads: list[float]) -> int:
    """Return the index of the smallest load; among equals the id decides, lest all workers begin with the first."""
    least = min(loads, default=inf)
    if least == inf:
        raise _none_available(len(loads))
    equals = [index for index, load in enumerate(loads) if load == least]
    return equals[crc32(key.encode()) % len(equals)] if len(equals) > 1 else equals[0]


# What configs call them


def _least_tokens(config: LeastTokensConfig, _resources: Resources) -> Router:
    return LeastTokens(config)


def _round_robin(_config: NoConfig, _resources: Resources) -> Router:
    return RoundRobin()


def _least_requests(_config: NoConfig, _resources: Resources) -> Router:
    return LeastRequests()


def _consistent_hash(config: ConsistentHashConfig, _resources: Resources) -> Router:
    return ConsistentHash(config)


ROUTERS: Final[Mapping[str, tuple[Callable[[Any, Resources], Router], type]]] = {
    "least_tokens": (_least_tokens, LeastTokensConfig),
    "round_robin": (_round_robin, NoConfig),
    "least_requests": (_least_requests, NoConfig),
    "consistent_hash": (_consistent_hash, ConsistentHashConfig),
}
"""Name in configs to factory and config class, as `turnwise.registry.Registry.add` takes them."""
