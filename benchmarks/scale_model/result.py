"""Measurements of the scale model: throughput, use of each part, and the costs of start and death."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Final

from attrs import asdict, define, field, frozen

from scale_model.costs import Costs
from scale_model.parts import Station
from scale_model.run import Run
from scale_model.simulation import Simulation
from turnwise_routing_bench.simulator import ReplicaModel

_ADDRESS_BYTES: Final = 100
"""Size of the address of a channel in a message."""

SATURATED: Final = 0.9
"""Use of a part from which on it limits the run."""


@frozen(kw_only=True)
class ScaleResult:
    """
    Measurements of a run after its warm-up; a use is the busy fraction of the time.

    Attributes:
        seconds: of model time.
        turns: ended turns of the whole run.
        episodes: delivered episodes of the whole run.
        turns_per_s: of the whole run.
        episodes_per_s: of the whole run.
        mean_in_flight: started and undelivered episodes of the whole run, on average.
        mean_episode_s: seconds from the start of an episode to its delivery, on average.
        driver: use of the driver's event loop.
        network: use of the driver's network.
        worker: mean use of the workers' event loops.
        worker_max: use of the busiest one.
        replica: mean use of the replicas' event loops.
        replica_max: use of the busiest one.
        engine: running requests relative to the most that engines run; 0 for engines without a limit.
        prefix_hit_rate: context tokens that engines had cached, relative to all sent ones.
        turns_per_message: requests in a worker's message, on average.
        backlog_bytes: most results that had reached the driver and waited for it.
        retried: episodes that ran again because their worker died.
        moved: requests that moved because their replica died.
        driver_s: CPU seconds of the driver, with its other threads.
        workers_s: CPU seconds of all workers, with their other threads.
        replicas_s: CPU seconds of all replicas, with their other threads, without engines.
        messages: numbers of messages by kind: `to_replica`, `to_worker`, `collects`.
        wakes: numbers of jobs that found a process idle, by its kind: `driver`, `worker`, `replica`.
    """

    seconds: float
    turns: int
    episodes: int
    turns_per_s: float
    episodes_per_s: float
    mean_in_flight: float
    mean_episode_s: float
    driver: float
    network: float
    worker: float
    worker_max: float
    replica: float
    replica_max: float
    engine: float
    prefix_hit_rate: float
    turns_per_message: float
    backlog_bytes: float
    retried: int
    moved: int
    driver_s: float
    workers_s: float
    replicas_s: float
    messages: dict[str, int]
    wakes: dict[str, int]

    @property
    def bottleneck(self) -> str:
        """The busiest part, if it is saturated; otherwise the latency of tools and messages limits the run."""
        uses = {
            "driver": self.driver,
            "network": self.network,
            "workers": self.worker,
            "replica processes": self.replica,
            "engines": self.engine,
        }
        name = max(uses, key=lambda each: uses[each])
        return name if uses[name] >= SATURATED else "latency"


@frozen(kw_only=True)
class FixedCosts:
    """
    Costs of a run that do not depend on its episodes: each worker knows each replica.

    Attributes:
        pairs: workers times replicas, each with a channel.
        start_gcs_s: CPU seconds of the head node's control process (GCS) at the start.
        start_driver_s: CPU seconds of the driver at the start.
        start_worker_s: CPU seconds of a worker for its channels.
        start_replica_s: CPU seconds of a replica for its channels.
        pings: use of the driver by its pings.
        view_turn_s: CPU seconds of a worker for one look at all replicas, which each turn takes.
        death_driver_s: CPU seconds of the driver for the death and the restart of one replica.
        death_gcs_s: the same at the GCS.
    """

    pairs: int
    start_gcs_s: float
    start_driver_s: float
    start_worker_s: float
    start_replica_s: float
    pings: float
    view_turn_s: float
    death_driver_s: float
    death_gcs_s: float

    @classmethod
    def of(cls, planned: Run, costs: Costs) -> FixedCosts:
        """Return the costs of a run."""
        num_workers, num_replicas = planned.num_workers, planned.num_replicas
        actors, addresses = num_workers + num_replicas, _ADDRESS_BYTES * num_replicas
        return cls(
            pairs=num_workers * num_replicas,
            start_gcs_s=actors * costs.gcs_actor_s,
            start_driver_s=actors * costs.call_s + num_workers * (costs.post_s + costs.sent_bytes_s(addresses)),
            start_worker_s=num_replicas * costs.dial_s,
            start_replica_s=num_workers * costs.accept_s,
            pings=actors * costs.call_s / planned.ping_s if planned.ping_s else 0.0,
            view_turn_s=num_replicas * costs.view_s,
            death_driver_s=2 * num_workers * costs.post_s,
            death_gcs_s=costs.gcs_death_s + costs.gcs_actor_s,
        )


@define(eq=False)
class _Snapshot:
    """The state at the end of the warm-up."""

    at_s: float = 0.0
    busy: dict[Station, float] = field(factory=dict)
    engine_area: float = 0.0
    totals: Counter[str] = field(factory=Counter)
    area: float = 0.0
    sojourn_s: float = 0.0

    def take(self, simulation: Simulation) -> None:
        simulation.count_in_flight(0)
        now = simulation.queue.now
        self.at_s, self.totals = now, Counter(simulation.totals)
        self.area, self.sojourn_s = simulation.area, simulation.sojourn_s
        self.busy = {station: station.busy_until(now) for station in _stations(simulation)}
        self.engine_area = _engine_area(simulation)


def _stations(simulation: Simulation) -> list[Station]:
    workers = [worker.station for worker in simulation.workers]
    return [simulation.driver, *workers, *(replica.station for replica in simulation.replicas)]


def _engine_area(simulation: Simulation) -> float:
    for replica in simulation.replicas:
        replica.engine.advance()
    return sum(replica.engine.area for replica in simulation.replicas)


def simulate(run: Run, costs: Costs) -> ScaleResult:
    """Simulate a run and return its measurements."""
    simulation, start = Simulation(run, costs), _Snapshot()
    if run.warm_up_s:
        simulation.queue.schedule(run.warm_up_s, partial(start.take, simulation))
    simulation.simulate()
    return _result(simulation, start)


def _result(simulation: Simulation, start: _Snapshot) -> ScaleResult:
    run, costs, now = simulation.run, simulation.costs, simulation.queue.now
    seconds = max(now - start.at_s, 1e-9)
    totals = Counter({name: (n - start.totals[name]) for name, n in simulation.totals.items()})

    def busy_s(station: Station) -> float:
        return station.busy_until(now) - start.busy.get(station, 0.0)

    workers = [busy_s(worker.station) for worker in simulation.workers]
    replicas = [busy_s(replica.station) for replica in simulation.replicas]
    engine_limit = run.engine.max_in_flight if isinstance(run.engine, ReplicaModel) else None
    engines = _engine_area(simulation) - start.engine_area
    cached = sum(replica.engine.replica.num_cached_tokens for replica in simulation.replicas)
    sent = sum(replica.engine.num_sent_tokens for replica in simulation.replicas)
    return ScaleResult(
        seconds=seconds,
        turns=totals["turns"] * run.fold,
        episodes=totals["episodes"] * run.fold,
        turns_per_s=totals["turns"] * run.fold / seconds,
        episodes_per_s=totals["episodes"] * run.fold / seconds,
        mean_in_flight=(simulation.area - start.area) / seconds * run.fold,
        mean_episode_s=(simulation.sojourn_s - start.sojourn_s) / max(1, totals["episodes"]),
        driver=busy_s(simulation.driver) / seconds,
        network=totals["driver_bytes"] * run.fold * run.network_byte_s / seconds,
        worker=sum(workers) / len(workers) / seconds,
        worker_max=max(workers) / seconds,
        replica=sum(replicas) / len(replicas) / seconds,
        replica_max=max(replicas) / seconds,
        engine=engines / (engine_limit * len(replicas) * seconds) if engine_limit else 0.0,
        prefix_hit_rate=cached / sent if sent else 0.0,
        turns_per_message=totals["turns"] / max(1, totals["to_replica"]),
        backlog_bytes=simulation.max_backlog_bytes * run.fold,
        retried=totals["retried"],
        moved=totals["moved"],
        driver_s=busy_s(simulation.driver) + costs.driver_idle * seconds,
        workers_s=sum(workers) * run.fold + costs.worker_idle * seconds * run.num_workers,
        replicas_s=sum(replicas) * run.fold + costs.replica_idle * seconds * run.num_replicas,
        messages={name: totals[name] * run.fold for name in ("to_replica", "to_worker", "collects")},
        wakes={
            "driver": simulation.driver.num_wakes,
            "worker": run.fold * sum(worker.station.num_wakes for worker in simulation.workers),
            "replica": run.fold * sum(replica.station.num_wakes for replica in simulation.replicas),
        },
    )


def as_plain(result: ScaleResult) -> dict[str, object]:
    """Return a result as a JSON object, with its bottleneck."""
    return {**asdict(result), "bottleneck": result.bottleneck}
