"""
Routers with simple rules of other systems, to compare with.

Each is sticky: the turns of an episode go to one replica, whose prefix cache holds its context, from the first request
until `release`. They differ in the choice for a new episode. They ignore the part of a trajectory id after its first
slash (paths and further records of an episode, such as `abc/p1`). They are not thread-safe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b

from attrs import field, frozen, validators

from turnwise.protocols import ReplicaLoad
from turnwise.types import GenerateRequest
from turnwise_routers.decision import Decision, Reason, episode_of, none_available


class StickyRouter(ABC):
    """
    Keeps an episode on its replica; a subclass chooses for an episode that is new or whose replica is gone.

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
        """Return a choice with its reason; `EngineError` when no replica is available."""
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
        """Return the number of resident episodes."""
        return len(self._home)

    @abstractmethod
    def _first(self, key: str, replicas: Sequence[ReplicaLoad]) -> int:
        """Return an available replica for an episode that has none; `EngineError` when there is none."""


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
        raise none_available(len(replicas))


class LeastRequests(StickyRouter):
    """New episodes go where the fewest requests are in flight; the first of equals."""

    def _first(self, key: str, replicas: Sequence[ReplicaLoad]) -> int:
        open_ones = [(load.num_requests, index) for index, load in enumerate(replicas) if load.available]
        if not open_ones:
            raise none_available(len(replicas))
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
        raise none_available(len(replicas))

    def _ring(self, num_replicas: int) -> tuple[list[int], list[int]]:
        if num_replicas not in self._rings:
            per_replica = self._config.points_per_replica
            cuts = sorted((_point(f"{i}/{k}"), i) for i in range(num_replicas) for k in range(per_replica))
            self._rings[num_replicas] = [point for point, _ in cuts], [index for _, index in cuts]
        return self._rings[num_replicas]
