"""
Placement of a run's replicas and workers, planned from its config alone, without Ray.

A replica has as many devices as the product of the engine's parallel sizes. So the number of replicas follows from the
number of devices. `turnwise.runtime.ray.placement_groups` reserves the planned devices on a cluster.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from attrs import evolve, field, frozen

from turnwise.config.parts import Choice
from turnwise.config.run import JudgeConfig, RunConfig
from turnwise.config.runtime import MOST_PROCESSES, PoolConfig, RuntimeConfig
from turnwise.errors import ConfigError
from turnwise.types import JsonObject

PARALLEL_SIZES: Final = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
"""Engine options whose product is the number of devices of a replica."""

_ADDRESS: Final = re.compile(r"(?:ray://)?(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})")
_ADDRESSES_WITHOUT_HOST: Final = ("auto", "local")

Bundle = Mapping[str, float]
"""Resources that one bundle of a placement group reserves on one node, by Ray's names."""


@frozen(kw_only=True)
class PoolPlacement:
    """
    The replicas of one model.

    Attributes:
        name: `policy` or `judge`.
        max_replicas: most replicas that the pool grows to while the run lasts; None for a fixed number.
        parallel: parallel sizes of a replica, by the name of the engine's option.
        num_devices: devices that one replica reserves; a fraction if replicas share a GPU.
        bundles: placement-group bundles of one replica; empty if it reserves nothing.
        resources: other resources of one replica, by the names of Ray's options.
        python: interpreter of the replicas; None for the run's own.
        max_in_flight: most requests that a replica passes to its engine at once.
    """

    name: str = "policy"
    engine: str = ""
    num_replicas: int = 1
    max_replicas: int | None = None
    parallel: Mapping[str, int] = field(factory=dict)
    device: Literal["GPU", "CPU"] = "CPU"
    num_devices: float = 0
    bundles: tuple[Bundle, ...] = ()
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK"
    resources: JsonObject = field(factory=dict)
    labels: Mapping[str, str] = field(factory=dict)
    python: str | None = None
    max_in_flight: int = 1024

    @property
    def total_devices(self) -> float:
        """Devices of all replicas."""
        return self.num_replicas * self.num_devices


@frozen(kw_only=True)
class RunPlacement:
    """The processes of a run and their resources; reward workers have the same as workers."""

    runtime: str
    address: str | None
    pools: tuple[PoolPlacement, ...]
    num_workers: int
    worker_bundle: Bundle = field(factory=dict)
    worker_labels: Mapping[str, str] = field(factory=dict)
    reward_workers: int = 0
    devices_per_node: int = 8

    @property
    def needs(self) -> dict[str, float]:
        """Resources that the run reserves of a cluster, by Ray's names."""
        workers = [self.worker_bundle] * (self.num_workers + self.reward_workers)
        return _sum([*workers, *(bundle for pool in self.pools for bundle in pool.bundles * pool.num_replicas)])


def plan_placement(config: RunConfig) -> RunPlacement:
    """
    Plan the placement of a resolved config.

    Raises:
        ConfigError: the number of devices is no multiple of a replica's, numbers contradict each other, or the address
            has an unknown form; one line with the arithmetic.
    """
    if config.runtime.reward_workers and config.reward is None and config.group_reward is None:
        raise ConfigError(
            "runtime.reward_workers: there is no reward to score with; "
            "set reward or group_reward, or reward_workers to 0"
        )
    placement = plan_runtime_placement(config.runtime, config.engine, config.judge)
    pools = tuple(evolve(pool, python=_locate_interpreter(config, pool)) for pool in placement.pools)
    return evolve(placement, pools=pools)


def _locate_interpreter(config: RunConfig, pool: PoolPlacement) -> str | None:
    """Return the interpreter of a pool; a name with a slash is a path beside the config."""
    # Links are kept: the interpreter of a virtual environment links to one without its packages.
    if pool.python is None or "/" not in pool.python:
        return pool.python
    return str(config.locate(pool.python).absolute())


def plan_runtime_placement(
    runtime: RuntimeConfig, engine: Choice | None = None, judge: JudgeConfig | None = None
) -> RunPlacement:
    """Plan the placement of a runtime section; replicas of an unknown engine have one device."""
    policy = _plan_pool("policy", engine or Choice("unnamed"), _policy_pool(runtime), runtime)
    if runtime.ray.max_replicas is not None and runtime.name == "ray":
        policy = _growing(policy, runtime.ray.max_replicas)
    pools = [policy]
    if judge is not None:
        pools.append(_plan_pool("judge", judge.engine, judge.pool, runtime))
    if runtime.name == "local":
        for pool in pools:
            if pool.num_replicas > 1:
                raise ConfigError(
                    f"{_path(pool.name)}.total_devices: makes {pool.num_replicas} replicas, and the runtime local has "
                    "one; set runtime.name to ray"
                )
    elif runtime.ray.address is not None:
        parse_address(runtime.ray.address)
    asked = runtime.ray.worker_resources
    return RunPlacement(
        runtime=runtime.name,
        address=runtime.ray.address if runtime.name == "ray" else None,
        pools=tuple(pools),
        num_workers=runtime.num_workers,
        worker_bundle=bundle_of(asked) if runtime.name == "ray" else {},
        worker_labels=asked.get("labels", {}),
        reward_workers=runtime.reward_workers,
        devices_per_node=runtime.ray.devices_per_node,
    )


def _growing(policy: PoolPlacement, max_replicas: int) -> PoolPlacement:
    if max_replicas < policy.num_replicas:
        raise ConfigError(
            f"runtime.ray.max_replicas: {max_replicas} is less than the {_count(policy.num_replicas, 'replica')} at "
            "the start; raise it, or leave it out"
        )
    return evolve(policy, max_replicas=max_replicas)


def _policy_pool(runtime: RuntimeConfig) -> PoolConfig:
    return PoolConfig(
        num_replicas=runtime.num_replicas,
        total_devices=runtime.total_devices,
        device=runtime.device,
        replica_resources=runtime.ray.replica_resources,
        replica_python=runtime.ray.replica_python,
        max_in_flight=runtime.ray.max_in_flight,
    )


def _plan_pool(name: str, engine: Choice, pool: PoolConfig, runtime: RuntimeConfig) -> PoolPlacement:
    """Plan the replicas of one model; errors as in `plan_placement`."""
    parallel = _parallel_sizes(name, engine)
    asked = dict(pool.replica_resources)
    # An engine with parallel sizes runs on GPUs; one without, such as a scripted engine, needs no device.
    on_gpu = pool.device == "gpu" or (pool.device == "auto" and bool(parallel or asked.get("num_gpus")))
    placement = PoolPlacement(
        name=name,
        engine=engine.name,
        parallel=parallel,
        device="GPU" if on_gpu else "CPU",
        python=pool.replica_python,
        max_in_flight=pool.max_in_flight,
        resources={key: value for key, value in asked.items() if key in ("memory", "resources")},
        labels=asked.get("labels", {}),
    )
    placement = evolve(placement, num_replicas=_num_replicas(placement, pool))
    if runtime.name == "local":
        return placement
    return _with_bundles(placement, pool, runtime.ray.devices_per_node)


def _parallel_sizes(name: str, engine: Choice) -> dict[str, int]:
    """Return the engine's parallel sizes. The plan needs them before the engine's plugin checks its options."""
    path = "engine" if name == "policy" else f"{name}.engine"
    sizes = {
        key: 1 if engine.options[key] is None else engine.options[key]
        for key in PARALLEL_SIZES
        if key in engine.options
    }
    for key, size in sizes.items():
        if type(size) is not int or not 1 <= size <= MOST_PROCESSES:
            raise ConfigError(f"{path}.{key}: expected an integer from 1 to {MOST_PROCESSES}, got {size!r:.80}")
    if prod(sizes.values()) > MOST_PROCESSES:
        raise ConfigError(f"{path}: a replica has at most {MOST_PROCESSES} devices, not{_factors(sizes)}")
    return sizes


def _num_replicas(placement: PoolPlacement, pool: PoolConfig) -> int:
    size = prod(placement.parallel.values())
    total = pool.total_devices
    if total is None:
        return pool.num_replicas or 1
    path = f"{_path(placement.name)}.total_devices: {total}"
    each = f"the {_count(size, 'device')} of one replica{_factors(placement.parallel)}"
    if total < size:
        raise ConfigError(f"{path} is less than {each}")
    if total % size:
        below = total // size
        raise ConfigError(
            f"{path} does not divide by {each}: {below * size} would make {_count(below, 'replica')}, "
            f"{(below + 1) * size} would make {_count(below + 1, 'replica')}"
        )
    if pool.num_replicas not in (None, total // size):
        raise ConfigError(
            f"{_path(placement.name)}.num_replicas: {pool.num_replicas} contradicts total_devices: {total} devices // "
            f"{each} make {_count(total // size, 'replica')}; leave one of the two out"
        )
    return total // size


def _with_bundles(placement: PoolPlacement, pool: PoolConfig, devices_per_node: int) -> PoolPlacement:
    """Reserve the devices of a replica: in one bundle if a node has enough, else in a bundle for each device."""
    size, on_cpu = prod(placement.parallel.values()), placement.device == "CPU"
    asked = pool.replica_resources
    num_gpus = 0.0 if on_cpu else _num_gpus(placement, asked)
    cpus = asked.get("num_cpus", size if on_cpu and pool.total_devices else 0)
    first = bundle_of({**asked, "num_gpus": num_gpus, "num_cpus": cpus})
    placement = evolve(placement, num_devices=cpus if on_cpu else num_gpus)
    if num_gpus <= devices_per_node:
        return evolve(placement, bundles=(first,) if first else ())
    # The engine's driver process runs in the first bundle, and needs the CPUs and the memory.
    others = [{"GPU": 1.0} for _ in range(size - 1)]
    return evolve(placement, bundles=(first | {"GPU": 1.0}, *others), strategy="PACK")


def _num_gpus(placement: PoolPlacement, asked: Mapping[str, Any]) -> float:
    size = prod(placement.parallel.values())
    num_gpus = asked.get("num_gpus", size)
    # A replica with one device may share it. A replica whose engine chooses its devices itself may reserve none.
    if num_gpus in (0, size) or (size == 1 and num_gpus < 1) or not placement.parallel:
        return float(num_gpus)
    raise ConfigError(
        f"{_ray_path(placement.name)}.replica_resources.num_gpus: {num_gpus} contradicts the "
        f"{_count(size, 'device')} of one replica{_factors(placement.parallel)}; leave it out"
    )


def _path(name: str) -> str:
    return "runtime" if name == "policy" else f"{name}.pool"


def _ray_path(name: str) -> str:
    return "runtime.ray" if name == "policy" else _path(name)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _factors(parallel: Mapping[str, int]) -> str:
    return f" ({' * '.join(f'{name} {size}' for name, size in parallel.items())})" if parallel else ""


def bundle_of(asked: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources of Ray's options by the names that bundles have."""
    named = {"GPU": asked.get("num_gpus", 0), "CPU": asked.get("num_cpus", 0), "memory": asked.get("memory") or 0}
    return _nonzero({**named, **(asked.get("resources") or {})})


def _nonzero(bundle: Mapping[str, float]) -> dict[str, float]:
    return {name: float(amount) for name, amount in bundle.items() if amount}


def _sum(bundles: Iterable[Bundle]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return _nonzero(total)


def parse_address(address: str) -> tuple[str, int] | None:
    """Return host and port of a cluster's address; None for `auto` and `local`, `ConfigError` if it is invalid."""
    if address in _ADDRESSES_WITHOUT_HOST:
        return None
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise ConfigError(f"runtime.ray.address: expected host:port, ray://host:port, auto or local, got {address!r}")
    return found["ipv6"] or found["host"], int(found["port"])


def check_interpreters(placement: RunPlacement) -> None:
    """
    Raise `ConfigError` if the run starts its own Ray on this machine and an interpreter does not exist.

    The nodes of a running cluster may have interpreters that this machine lacks.
    """
    if placement.runtime != "ray" or placement.address not in (None, "local"):
        return
    for pool in placement.pools:
        python = pool.python or ""
        key = f"{_ray_path(pool.name)}.replica_python"
        if "/" in python and not (Path(python).is_file() and os.access(python, os.X_OK)):
            raise ConfigError(
                f"{key}: {python!r} is not an executable file; create the engine's virtual environment first"
            )
        if python and "/" not in python and shutil.which(python.split()[0]) is None:
            raise ConfigError(f"{key}: {python!r} is not on the PATH; use the path of an interpreter")
