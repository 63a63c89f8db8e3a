"""
Where a run's replicas and workers go, worked out from its config alone: nothing is started and no Ray is needed.

Devices per replica are the product of the engine's parallel sizes, so the number of replicas follows from the number of
devices. What becomes of a plan on a cluster is in `turnwise.runtime.ray_placement`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from attrs import evolve, field, frozen

from turnwise.config import JudgeConfig, RunConfig
from turnwise.config_parts import Choice
from turnwise.config_runtime import PoolConfig, RuntimeConfig
from turnwise.errors import ConfigError

PARALLEL_SIZES: Final = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
"""Options of an engine whose product is its number of devices."""

_ADDRESS: Final = re.compile(r"(?:ray://)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})")
_ADDRESSES_WITHOUT_HOST: Final = ("auto", "local")

Bundle = Mapping[str, float]
"""What one placement-group bundle reserves on one node, by Ray's names of resources."""


@frozen(kw_only=True)
class PoolPlacement:
    """
    The replicas of one model.

    Attributes:
        name: `policy` or `judge`.
        engine: the engine's registered name.
        num_replicas: how many.
        parallel: sizes of each replica, by the name of the engine's option.
        device: `GPU` or `CPU`.
        num_devices: what one replica reserves of these; a fraction when replicas share a GPU, 0 for none.
        bundles: of one replica's placement group; none when it reserves nothing.
        strategy: how Ray places the bundles.
        resources: what one replica reserves besides its devices, by Ray's names of options.
        python: interpreter of the replicas; None for that of the run.
        max_in_flight: requests that a replica's engine gets at once.
    """

    name: str = "policy"
    engine: str = ""
    num_replicas: int = 1
    parallel: Mapping[str, int] = field(factory=dict)
    device: Literal["GPU", "CPU"] = "CPU"
    num_devices: float = 0
    bundles: tuple[Bundle, ...] = ()
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK"
    resources: Mapping[str, Any] = field(factory=dict)
    python: str | None = None
    max_in_flight: int = 1024

    @property
    def total_devices(self) -> float:
        """Devices of all replicas together."""
        return self.num_replicas * self.num_devices

    @property
    def needs(self) -> dict[str, float]:
        """What all replicas together reserve, by Ray's names of resources."""
        return _sum(bundle for _ in range(self.num_replicas) for bundle in self.bundles)


@frozen(kw_only=True)
class RunPlacement:
    """
    What a run starts, and where.

    Attributes:
        runtime: `local` or `ray`.
        address: of the cluster; None starts one.
        pools: the replicas, by model.
        num_workers: event loops that drive episodes.
        worker_cpus: CPUs that each of them, and each reward worker, reserves.
        reward_workers: actors that score episodes.
        devices_per_node: most devices that one node has.
    """

    runtime: str
    address: str | None
    pools: tuple[PoolPlacement, ...]
    num_workers: int
    worker_cpus: float = 0.0
    reward_workers: int = 0
    devices_per_node: int = 8

    @property
    def needs(self) -> dict[str, float]:
        """What the run reserves of a cluster, by Ray's names of resources."""
        return _sum(
            [*(pool.needs for pool in self.pools), {"CPU": (self.num_workers + self.reward_workers) * self.worker_cpus}]
        )

    @property
    def largest_bundle(self) -> dict[str, float]:
        """What one node must have at least: the most that a bundle asks for, of each resource."""
        largest: Counter[str] = Counter()
        for pool in self.pools:
            for bundle in pool.bundles:
                largest |= Counter(bundle)
        return dict(largest)

    @property
    def num_nodes(self) -> int:
        """How many nodes of `devices_per_node` GPUs hold the replicas, put together as closely as they go."""
        free: list[float] = []
        amounts = [bundle.get("GPU", 0.0) for pool in self.pools for bundle in pool.bundles * pool.num_replicas]
        for amount in sorted(filter(None, amounts), reverse=True):
            place = next((i for i, left in enumerate(free) if left >= amount), None)
            if place is None:
                free.append(self.devices_per_node - amount)
            else:
                free[place] -= amount
        return len(free)


def placement_of(config: RunConfig) -> RunPlacement:
    """
    Return what a resolved config asks for.

    Raises:
        ConfigError: the devices do not divide by those of a replica, or numbers contradict each other; one line with
            the arithmetic. Or the address has no form that Ray knows.
    """
    if config.runtime.reward_workers and config.reward is None:
        raise ConfigError(
            "runtime.reward_workers: there is no reward to score with; set reward, or reward_workers to 0"
        )
    placement = placement_of_runtime(config.runtime, config.engine, config.judge)
    return evolve(placement, pools=tuple(evolve(pool, python=_interpreter(config, pool)) for pool in placement.pools))


def _interpreter(config: RunConfig, pool: PoolPlacement) -> str | None:
    """Return the interpreter of a pool's replicas; one with a slash is a path, and its links are not followed."""
    if pool.python is None or "/" not in pool.python:
        return pool.python
    return str(config.locate(pool.python).absolute())


def placement_of_runtime(
    runtime: RuntimeConfig, engine: Choice | None = None, judge: JudgeConfig | None = None
) -> RunPlacement:
    """Return the same for a runtime whose engines need not be known; without a name they have one device each."""
    pools = [pool_of("policy", engine or Choice("unnamed"), _policy_pool(runtime), runtime)]
    if judge is not None:
        pools.append(pool_of("judge", judge.engine, judge.pool, runtime))
    if runtime.name == "local":
        for pool in pools:
            if pool.num_replicas > 1:
                raise ConfigError(
                    f"{_path(pool.name)}.total_devices: makes {pool.num_replicas} replicas, and the runtime local has "
                    "one; set runtime.name to ray"
                )
    elif runtime.ray.address is not None:
        host_and_port(runtime.ray.address)
    return RunPlacement(
        runtime=runtime.name,
        address=runtime.ray.address if runtime.name == "ray" else None,
        pools=tuple(pools),
        num_workers=runtime.num_workers,
        worker_cpus=runtime.ray.worker_cpus if runtime.name == "ray" else 0.0,
        reward_workers=runtime.reward_workers,
        devices_per_node=runtime.ray.devices_per_node,
    )


def _policy_pool(runtime: RuntimeConfig) -> PoolConfig:
    return PoolConfig(
        num_replicas=runtime.num_replicas,
        total_devices=runtime.total_devices,
        device=runtime.device,
        replica_resources=runtime.ray.replica_resources,
        replica_python=runtime.ray.replica_python,
        max_in_flight=runtime.ray.max_in_flight,
    )


def pool_of(name: str, engine: Choice, pool: PoolConfig, runtime: RuntimeConfig) -> PoolPlacement:
    """Return where the replicas of one model go; errors as in `placement_of`."""
    parallel = {size: int(engine.options[size] or 1) for size in PARALLEL_SIZES if size in engine.options}
    asked = dict(pool.replica_resources)
    on_gpu = pool.device == "gpu" or (pool.device == "auto" and bool(parallel or asked.get("num_gpus")))
    placement = PoolPlacement(
        name=name,
        engine=engine.name,
        parallel=parallel,
        device="GPU" if on_gpu else "CPU",
        python=pool.replica_python,
        max_in_flight=pool.max_in_flight,
        resources={key: value for key, value in asked.items() if key in ("memory", "resources")},
    )
    placement = evolve(placement, num_replicas=_num_replicas(placement, pool))
    if runtime.name == "local":
        return placement
    return _with_bundles(placement, pool, runtime.ray.devices_per_node)


def _num_replicas(placement: PoolPlacement, pool: PoolConfig) -> int:
    size = prod(placement.parallel.values())
    total = pool.total_devices
    if total is None:
        return pool.num_replicas or 1
    path = f"{_path(placement.name)}.total_devices: {total}"
    each = f"the {_devices(size)} of one replica{_factors(placement.parallel)}"
    if total < size:
        raise ConfigError(f"{path} is less than {each}")
    if total % size:
        below = total // size
        raise ConfigError(
            f"{path} does not divide by {each}: {below * size} would make {_replicas(below)}, "
            f"{(below + 1) * size} would make {_replicas(below + 1)}"
        )
    if pool.num_replicas not in (None, total // size):
        raise ConfigError(
            f"{_path(placement.name)}.num_replicas: {pool.num_replicas} contradicts total_devices: {total} devices // "
            f"{each} make {_replicas(total // size)}; leave one of the two out"
        )
    return total // size


def _with_bundles(placement: PoolPlacement, pool: PoolConfig, devices_per_node: int) -> PoolPlacement:
    """Reserve a replica's devices: in one bundle when a node has as many, else in a bundle for each."""
    size = prod(placement.parallel.values())
    asked = pool.replica_resources
    extra = dict(asked.get("resources") or {})
    if asked.get("memory"):
        extra["memory"] = asked["memory"]
    cpus = asked.get("num_cpus", 0)
    if placement.device == "CPU":
        cpus = asked.get("num_cpus", size if pool.total_devices else 0)
        bundle = _nonzero({"CPU": cpus, **extra})
        return evolve(placement, num_devices=cpus, bundles=(bundle,) if bundle else ())
    num_gpus = _num_gpus(placement, asked)
    if num_gpus <= devices_per_node:
        bundle = _nonzero({"GPU": num_gpus, "CPU": cpus, **extra})
        return evolve(placement, num_devices=num_gpus, bundles=(bundle,) if bundle else ())
    first = _nonzero({"GPU": 1, "CPU": cpus, **extra})
    others = [{"GPU": 1.0} for _ in range(size - 1)]
    return evolve(placement, num_devices=num_gpus, bundles=(first, *others), strategy="PACK")


def _num_gpus(placement: PoolPlacement, asked: Mapping[str, Any]) -> float:
    size = prod(placement.parallel.values())
    num_gpus = asked.get("num_gpus", size)
    # A replica of one device may share it, and one whose engine finds its devices itself may reserve none.
    if num_gpus == size or num_gpus == 0 or (size == 1 and num_gpus < 1):
        return float(num_gpus)
    if not placement.parallel:
        return float(num_gpus)
    raise ConfigError(
        f"{_resources_path(placement.name)}.num_gpus: {num_gpus} contradicts the {_devices(size)} of one replica"
        f"{_factors(placement.parallel)}; leave it out"
    )


def _path(name: str) -> str:
    return "runtime" if name == "policy" else f"{name}.pool"


def _resources_path(name: str) -> str:
    return "runtime.ray.replica_resources" if name == "policy" else f"{name}.pool.replica_resources"


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _factors(parallel: Mapping[str, int]) -> str:
    return f" ({' * '.join(f'{name} {size}' for name, size in parallel.items())})" if parallel else ""


def _nonzero(bundle: Mapping[str, float]) -> dict[str, float]:
    return {name: float(amount) for name, amount in bundle.items() if amount}


def _sum(bundles: Iterable[Bundle]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return _nonzero(total)


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return where a cluster's address points; None for `auto` and `local`, `ConfigError` for what is no address."""
    if address in _ADDRESSES_WITHOUT_HOST:
        return None
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise ConfigError(f"runtime.ray.address: expected host:port, ray://host:port, auto or local, got {address!r}")
    return found["ipv6"] or found["host"], int(found["port"])


def check_interpreters(placement: RunPlacement) -> None:
    """
    Refuse an interpreter that is not on this machine, when the run starts its own Ray here; `ConfigError` names it.

    Of a cluster that runs already it is not known here what its nodes have.
    """
    if placement.runtime != "ray" or placement.address not in (None, "local"):
        return
    for pool in placement.pools:
        python = pool.python or ""
        key = f"{'runtime.ray' if pool.name == 'policy' else _path(pool.name)}.replica_python"
        if "/" in python and not (Path(python).is_file() and os.access(python, os.X_OK)):
            raise ConfigError(f"{key}: {python!r} is no executable file; make the engine's virtual environment first")
        if python and "/" not in python and shutil.which(python.split()[0]) is None:
            raise ConfigError(f"{key}: there is no {python!r} on the PATH")
