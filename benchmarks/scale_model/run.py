"""A run for the scale model, and the state of its processes."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from attrs import define, field, frozen, validators

from scale_model.parts import Engine, Outbox, Station
from turnwise.runtime.ray.calls import DRIVER_CALL_S
from turnwise_routing_bench.simulator import ReplicaModel, Running
from turnwise_routing_bench.traces import TraceTrajectory, at_least_1, finite_seconds, more_than_0

MakeEpisode = Callable[[random.Random, int], TraceTrajectory]


@frozen(kw_only=True)
class Death:
    """
    A process that dies.

    Attributes:
        at_s: time of the death.
        kind: `replica` or `worker`.
        index: of the process in the simulated share.
        detect_s: seconds until the driver knows: short for a process, long for a machine.
        restart_s: seconds from then until its successor is ready.
    """

    at_s: float = field(validator=finite_seconds)
    kind: str = field(validator=validators.in_(("replica", "worker")))
    index: int = field(validator=validators.ge(0))
    detect_s: float = field(default=0.1, validator=finite_seconds)
    restart_s: float = field(default=60.0, validator=finite_seconds)


@frozen(kw_only=True)
class Run:
    """
    A run to simulate.

    Attributes:
        num_workers: of the whole run; a multiple of `fold`.
        num_replicas: of the whole run; a multiple of `fold`.
        make_episode: returns the episode of a number, with the random numbers of the run.
        num_episodes: episodes of the whole run, a multiple of `fold`; None for as many as fit into the time.
        max_in_flight: episodes that a worker runs at once.
        window: episodes that a worker holds.
        engine: seconds per token, or the costs of a continuous-batching server.
        fold: equal shares, of which one is simulated.
        coalesce_s: as in `runtime.ray`.
        heartbeat_s: as in `runtime.ray`; 0 for no pings.
        latency_s: of a message on the network.
        network_byte_s: seconds per byte of a message on the network.
        cores: that all processes share; None for a core each.
        others: cores that programs outside the run keep busy meanwhile.
        until_s: end of the simulation; infinite until all episodes have ended.
        warm_up_s: start of the measurement.
        stagger: start the first episodes in the middle, as after a long time.
        deaths: processes that die.
        seed: of the random numbers.
    """

    num_workers: int = field(validator=at_least_1)
    num_replicas: int = field(validator=at_least_1)
    make_episode: MakeEpisode
    num_episodes: int | None = field(default=None, validator=validators.optional(at_least_1))
    max_in_flight: int = field(default=256, validator=at_least_1)
    window: int = field(default=512, validator=at_least_1)
    engine: ReplicaModel | float = field(factory=ReplicaModel)
    fold: int = field(default=1, validator=at_least_1)
    coalesce_s: float = field(default=0.02, validator=finite_seconds)
    heartbeat_s: float = field(default=5.0, validator=finite_seconds)
    latency_s: float = field(default=1e-4, validator=finite_seconds)
    network_byte_s: float = field(default=8e-11, validator=finite_seconds)
    cores: int | None = field(default=None, validator=validators.optional(at_least_1))
    others: float = field(default=0.0, validator=finite_seconds)
    until_s: float = field(default=math.inf, validator=more_than_0[0])
    warm_up_s: float = field(default=0.0, validator=finite_seconds)
    stagger: bool = False
    deaths: tuple[Death, ...] = ()
    seed: int = 0

    @property
    def ping_s(self) -> float:
        """Seconds between two pings of an actor; 0 for no pings."""
        return (
            max(self.heartbeat_s, DRIVER_CALL_S * (self.num_workers + self.num_replicas)) if self.heartbeat_s else 0.0
        )

    @property
    def collect_s(self) -> float:
        """Shortest time between two replies of a worker with finished episodes."""
        return max(self.coalesce_s, DRIVER_CALL_S * self.num_workers)

    def __attrs_post_init__(self) -> None:
        if self.num_episodes is None and self.until_s == math.inf:
            raise ValueError("a run without a number of episodes needs `until_s`")
        for count in (self.num_workers, self.num_replicas, self.num_episodes or self.fold):
            if count % self.fold:
                raise ValueError(f"workers, replicas and episodes must be multiples of fold, {self.fold}; got {count}")


@define(eq=False)
class Episode(Running):
    """An episode; `known` is the number of tokens that its replica holds."""

    number: int = 0
    worker: Worker | None = None
    link: Link | None = None
    started_at: float | None = None
    known: int = 0


@define(eq=False)
class Link:
    """A worker and a replica: what waits for the next message, and the requests without a result."""

    worker: Worker
    replica: ReplicaProcess
    key: tuple[int, int]
    requests: list[Episode] = field(factory=list)
    results: list[Episode] = field(factory=list)
    pending: dict[int, Episode] = field(factory=dict)
    num_released: int = 0
    to_replica: Outbox = field(init=False)
    to_worker: Outbox = field(init=False)


@define(eq=False)
class Worker:
    """
    A worker; its successor after a death is another object.

    Attributes:
        own: tokens of its requests at each replica; infinite while the replica is dead.
        reported: tokens of all requests at each replica, as it said with its last results.
        free: slots for episodes.
        waiting: episodes without a slot.
        finished: episodes that the driver has not asked for.
        held: undelivered episodes by number.
        num_running: started episodes that have not ended.
        collecting: the driver has asked for episodes, and has no reply.
        reply_due: a reply waits for its time.
        replied_at: time of the last reply.
        links: by replica; one simulated replica is `fold` replicas, told apart by the second number.
    """

    index: int
    station: Station
    own: list[float]
    reported: list[float]
    free: int
    waiting: deque[Episode] = field(factory=deque)
    finished: list[Episode] = field(factory=list)
    held: dict[int, Episode] = field(factory=dict)
    links: dict[tuple[int, int], Link] = field(factory=dict)
    num_running: int = 0
    collecting: bool = False
    reply_due: bool = False
    replied_at: float = -math.inf
    starting: bool = False
    dead: bool = False

    def must_reply(self, limit: int) -> bool:
        """Return whether a reply to the driver does not wait: nothing runs, or so many episodes have ended."""
        return not self.num_running or len(self.finished) >= limit

    def least_loaded(self, rng: random.Random) -> int | None:
        """Return the replica with the least tokens in this worker's view; None if none is live."""
        view = [max(own, reported) for own, reported in zip(self.own, self.reported, strict=True)]
        least = min(view)
        if least == math.inf:
            return None
        # The first of equals after a random one, as a router's hash chooses.
        start = rng.randrange(len(view))
        return view.index(least, start) if least in view[start:] else view.index(least)


@define(eq=False)
class ReplicaProcess:
    """A replica: its event loop and its engine."""

    index: int
    station: Station
    engine: Engine = field(init=False)
    dead: bool = False
