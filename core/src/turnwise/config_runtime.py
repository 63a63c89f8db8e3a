"""Where a run's episodes run: the `runtime` section of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field, frozen, validators

RuntimeName = Literal["local", "ray"]
RAY_RESOURCES: Final = ("num_cpus", "num_gpus", "memory", "resources")


def _count(default: int, at_least: int = 1) -> Any:
    return field(default=default, validator=validators.ge(at_least))


def _seconds(default: float) -> Any:
    return field(default=default, validator=validators.gt(0))


@frozen(kw_only=True)
class RayConfig:
    """
    Options of the runtime `ray`.

    Attributes:
        address: of a running cluster; null starts one that ends with the run, `auto` finds one.
        replica_resources: what Ray reserves for each replica: `num_cpus`, `num_gpus`, `memory` or `resources`.
        worker_cpus: CPUs that Ray reserves for a worker.
        replica_python: interpreter of the replicas, for an engine that has a virtual environment of its own.
        max_in_flight: requests that a replica's engine gets at once; the others wait at the replica.
        window: episodes that a worker is given at a time.
        heartbeat_s: seconds between pings of a replica.
        heartbeat_timeout_s: seconds without an answer after which a replica is killed and restarted.
        max_restarts: how often one replica, or one worker, is restarted.
        backoff_s: seconds before the first restart; it doubles each time.
        max_kills: workers that an episode may kill before it is set aside.
        start_timeout_s: seconds for an actor to start.
    """

    address: str | None = None
    replica_resources: Mapping[str, Any] = field(factory=dict)
    worker_cpus: float = field(default=0.0, validator=validators.ge(0))
    replica_python: str | None = None
    max_in_flight: int = _count(1024)
    window: int = _count(512)
    heartbeat_s: float = _seconds(5.0)
    heartbeat_timeout_s: float = _seconds(30.0)
    max_restarts: int = _count(3, at_least=0)
    backoff_s: float = _seconds(0.5)
    max_kills: int = _count(2)
    start_timeout_s: float = _seconds(300.0)

    def __attrs_post_init__(self) -> None:
        """Refuse a resource that Ray does not know."""
        for name in self.replica_resources:
            if name not in RAY_RESOURCES:
                raise ValueError(f"'replica_resources' may hold {', '.join(RAY_RESOURCES)}, not {name!r}")


@frozen(kw_only=True)
class RuntimeConfig:
    """
    Where episodes run; in a file, the bare name or a section.

    Attributes:
        name: `local` runs everything in this process, `ray` makes workers and replicas actors of a Ray cluster.
        num_workers: event loops that drive episodes.
        num_replicas: engines; more than one needs the runtime `ray`.
        ray: options of the runtime `ray`.
    """

    name: RuntimeName = "local"
    num_workers: int = _count(1)
    num_replicas: int = _count(1)
    ray: RayConfig = field(factory=RayConfig)

    def __attrs_post_init__(self) -> None:
        """Refuse replicas that nobody would use."""
        if self.name == "local" and self.num_replicas > 1:
            raise ValueError(f"'num_replicas' must be 1 with the runtime local: {self.num_replicas}; set name to ray")
