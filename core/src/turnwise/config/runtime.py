"""The `runtime` section of a config: the processes that run episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import Attribute, field, frozen, validators

RuntimeName = Literal["local", "ray"]
DeviceName = Literal["auto", "gpu", "cpu"]
RayResources = Mapping[str, Any]
"""Resources of an actor, in the forms that Ray gives each of them."""
RAY_RESOURCES: Final = ("num_cpus", "num_gpus", "memory", "resources", "labels")
MOST_PROCESSES: Final = 100_000
"""Most processes of a kind, and most devices. It is far above any cluster: a larger number is a slip of the pen."""
_LEAST_AMOUNT: Final = 1e-4
_MOST_AMOUNT: Final = 1e14
"""Ray counts amounts in units of 1/10,000, in 64 bits."""


def _count(default: int, at_least: int = 1) -> int:
    return field(default=default, validator=validators.ge(at_least))


def _process_count(default: int, at_least: int = 1) -> int:
    return field(default=default, validator=[validators.ge(at_least), validators.le(MOST_PROCESSES)])


def _optional_process_count() -> int | None:
    checks = validators.and_(validators.ge(1), validators.le(MOST_PROCESSES))
    return field(default=None, validator=validators.optional(checks))


def _seconds(default: float) -> float:
    return field(default=default, validator=validators.gt(0))


def _resources(_instance: object, attribute: Attribute[RayResources], value: RayResources) -> None:
    for name, asked in value.items():
        key = f"{attribute.name}.{name}"
        if name not in RAY_RESOURCES:
            raise ValueError(f"'{attribute.name}' may hold {', '.join(RAY_RESOURCES)}, not {name!r}")
        if name not in ("resources", "labels"):
            _check_amount(key, asked)
        elif not isinstance(asked, Mapping) or not all(isinstance(each, str) for each in asked):
            raise ValueError(f"'{key}' must be a section, not {asked!r:.80}")
        elif name == "resources":
            _check_own_resources(key, asked)
        elif not all(isinstance(each, str) for each in asked.values()):
            raise ValueError(f"'{key}' must hold texts: {dict(asked)!r:.80}")


def _check_own_resources(key: str, asked: Mapping[str, object]) -> None:
    for name, amount in asked.items():
        if name in ("CPU", "GPU", "memory"):
            raise ValueError(f"'{key}' must not hold {name}: set num_cpus, num_gpus or memory beside it")
        _check_amount(f"{key}.{name}", amount)


def _check_amount(key: str, amount: object) -> None:
    # The comparisons are false for NaN.
    if (
        isinstance(amount, bool)
        or not isinstance(amount, int | float)
        or not (amount == 0 or _LEAST_AMOUNT <= amount <= _MOST_AMOUNT)
    ):
        bounds = f"0, or a number from {_LEAST_AMOUNT:g} to {_MOST_AMOUNT:g}"
        raise ValueError(f"'{key}' must be {bounds}, not {amount!r:.80}")


def _python_name(_instance: object, attribute: Attribute[str | None], value: str | None) -> None:
    if value is not None and not value.strip():
        raise ValueError(f"'{attribute.name}' must be an interpreter, not {value!r}; null is the run's own")


@frozen(kw_only=True)
class RayConfig:
    """
    Options of the runtime `ray`.

    Attributes:
        address: of a running cluster; null starts one that ends with the run, `auto` finds one.
        trusted_network: allow a cluster without tokens at an address that other machines reach: everyone who reaches it
            can run code there.
        replica_resources: resources that Ray reserves for each replica: `num_cpus`, `num_gpus`, `memory` or
            `resources`; its devices need not be named. `labels` are required of its nodes.
        devices_per_node: most devices that one node has; a replica with more is spread over nodes.
        worker_resources: the same for each worker and reward worker; Ray spreads them over the nodes.
        replica_python: interpreter of the replicas, for an engine in a separate virtual environment; a value with a
            slash is a path relative to the config's folder.
        max_in_flight: requests that a replica's engine runs at once; further ones wait at the replica.
        coalesce_s: shortest time between two messages from one process to another; data in between joins the next
            message. Longer saves CPU when many episodes run, shorter saves delay; 0 sends at once.
        window: episodes that a worker holds at a time.
        heartbeat_s: seconds between pings of a replica or a worker.
        heartbeat_timeout_s: seconds without an answer after which an actor is killed and restarted: the longest time
            that a tool or a reward may block a worker's event loop.
        max_restarts: restarts in a row of one replica or worker; a minute of health resets the count.
        backoff_s: seconds before the first restart; the delay doubles each time.
        max_kills: workers that may die while they run an episode before it is a suspect. Suspects are tested in groups,
            in quarters and on all workers; an episode that kills a worker in a test of it alone fails.
        max_starts: attempts to start an actor, with the same back-off.
        reward_tries: attempts to score an episode when reward workers die or services fail.
        start_timeout_s: seconds for an actor to start, and for its devices to be free.
        autoscaling: the cluster adds nodes on demand, so a run that its present nodes cannot hold waits for others.
        max_replicas: most replicas of the policy: one more starts whenever the cluster, or its autoscaler, has room for
            it; null keeps their number.
    """

    address: str | None = None
    trusted_network: bool = False
    replica_resources: RayResources = field(factory=dict, validator=_resources)
    devices_per_node: int = _count(8)
    worker_resources: RayResources = field(factory=dict, validator=_resources)
    replica_python: str | None = field(default=None, validator=_python_name)
    max_in_flight: int = _count(1024)
    coalesce_s: float = field(default=0.02, validator=validators.ge(0))
    window: int = _count(512)
    heartbeat_s: float = _seconds(5.0)
    heartbeat_timeout_s: float = _seconds(30.0)
    max_restarts: int = _count(3, at_least=0)
    backoff_s: float = _seconds(0.5)
    max_kills: int = _count(2)
    max_starts: int = _count(3)
    reward_tries: int = _count(3)
    start_timeout_s: float = _seconds(300.0)
    autoscaling: bool = False
    max_replicas: int | None = _optional_process_count()


@frozen(kw_only=True)
class PoolConfig:
    """
    The replicas of a second model; the other options of `runtime` apply to both.

    Attributes:
        num_replicas: engines; null is 1, or follows from `total_devices`; more than one needs the runtime `ray`.
        total_devices: devices of all its replicas together.
        device: as in `runtime`.
        replica_resources: as in `runtime.ray`.
        replica_python: as in `runtime.ray`.
        max_in_flight: as in `runtime.ray`.
    """

    num_replicas: int | None = _optional_process_count()
    total_devices: int | None = _optional_process_count()
    device: DeviceName = "auto"
    replica_resources: RayResources = field(factory=dict, validator=_resources)
    replica_python: str | None = field(default=None, validator=_python_name)
    max_in_flight: int = _count(1024)


@frozen(kw_only=True)
class RuntimeConfig:
    """
    The processes that run episodes; in a file, the bare name or a section.

    Attributes:
        name: `local` runs everything in this process, `ray` makes workers and replicas actors of a Ray cluster.
        num_workers: event loops that drive episodes.
        num_replicas: engines; null is 1, or follows from `total_devices`; more than one needs the runtime `ray`.
        total_devices: devices of all replicas together. The number of replicas is this number divided by the product of
            the engine's `tensor_parallel_size`, `data_parallel_size` and `pipeline_parallel_size`.
        device: kind of the devices. `auto` is `gpu` for engines that have one of these options and where
            `ray.replica_resources` names `num_gpus`, and `cpu` for others.
        reward_workers: actors that score episodes; 0 scores them where they run; more needs the runtime `ray`.
        ray: options of the runtime `ray`.
    """

    name: RuntimeName = "local"
    num_workers: int = _process_count(1)
    num_replicas: int | None = _optional_process_count()
    total_devices: int | None = _optional_process_count()
    device: DeviceName = "auto"
    reward_workers: int = _process_count(0, at_least=0)
    ray: RayConfig = field(factory=RayConfig)

    def __attrs_post_init__(self) -> None:
        if self.name == "local" and (self.num_replicas or 1) > 1:
            raise ValueError(f"'num_replicas' must be 1 with the runtime local: {self.num_replicas}; set name to ray")
        if self.name == "local" and self.reward_workers:
            raise ValueError(f"'reward_workers' must be 0 with the runtime local, not {self.reward_workers}")
