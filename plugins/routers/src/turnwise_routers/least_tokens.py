"""
The router `least_tokens`: it chooses the replica that continues a trajectory.

It is sticky: the turns of an episode go to one replica, whose prefix cache holds its context, from the first request
until `release`. It moves an episode away from a replica that has become far busier than the rest. It ignores the part
of a trajectory id after its first slash (paths and further records of an episode, such as `abc/p1`).

A router keeps a small table and makes no remote calls, so a choice costs microseconds. It is not thread-safe; each
worker has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from zlib import crc32

from attrs import define, field, frozen, validators

from turnwise.protocols import ReplicaLoad
from turnwise.types import GenerateRequest
from turnwise_routers.decision import Decision, Reason, episode_of, none_available


@frozen(kw_only=True)
class LeastTokensConfig:
    """
    Options of `least_tokens`.

    Attributes:
        break_ratio: an episode may leave a replica whose tokens are more than this many times the mean.
        break_margin: and only when the gap to the least loaded is more than this many times its own context, which
            the new replica must prefill and then bear.
        prefix_slack: a replica that caches the group's prompt is preferred while its load exceeds the least load by at
            most this many lengths of the new context. Decoding next to that much more load costs, over a few hundred
            steps, about as much as prefilling the prompt once more.
        resident_weight: weight of a resident episode's tokens relative to tokens in flight: the episode returns when
            its tool has finished.
    """

    break_ratio: float = field(default=1.25, validator=[validators.ge(1), validators.lt(inf)])
    break_margin: float = field(default=1.0, validator=[validators.ge(0), validators.lt(inf)])
    prefix_slack: float = field(default=10.0, validator=[validators.ge(0), validators.lt(inf)])
    resident_weight: float = field(default=0.5, validator=[validators.ge(0), validators.lt(inf)])


@define(eq=False)
class _Stay:
    """The replica, size and group of an episode."""

    index: int
    num_tokens: int
    group_id: str


class LeastTokens:
    """
    Chooses the replica with the least outstanding tokens, weighed against cached prefixes.

    It counts tokens rather than requests, because contexts of one batch differ by more than an order of magnitude and a
    decode step reads them all. It remembers an episode until `release`, so an episode that waits for a slow tool still
    finds its context.
    """

    def __init__(self, config: LeastTokensConfig | None = None) -> None:
        self._config = config or LeastTokensConfig()
        self._stays: dict[str, _Stay] = {}
        self._holders: dict[str, dict[int, int]] = {}
        self._resident: list[int] = []

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self.decide(request, replicas).index

    def decide(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> Decision:
        """Return a choice with its reason; `EngineError` when no replica is available."""
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
        # The episode's own tokens would move with it.
        load = loads[home] - self._config.resident_weight * stay.num_tokens
        open_loads = [each for each in loads if each != inf]
        if load * len(open_loads) > self._config.break_ratio * sum(open_loads):
            least = _least(key, loads)
            if load - loads[least] > self._config.break_margin * num_tokens:
                return Decision(least, Reason.OVERLOADED)
        return Decision(home, Reason.STICKY)

    # The table

    def _loads(self, replicas: Sequence[ReplicaLoad]) -> list[float]:
        """Return a load in tokens per replica, infinite for unavailable ones."""
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
    """Return the index of the smallest load; ties break by id, so that workers do not all choose the first."""
    least = min(loads, default=inf)
    if least == inf:
        raise none_available(len(loads))
    equals = [index for index, load in enumerate(loads) if load == least]
    return equals[crc32(key.encode()) % len(equals)] if len(equals) > 1 else equals[0]
