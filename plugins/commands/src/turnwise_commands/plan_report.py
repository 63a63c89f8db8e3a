"""Checks a run, and prints where its replicas and workers would go."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from turnwise import Host, PoolPlacement, RunConfig, RunPlacement, check_run, plan_placement
from turnwise.config.models import reads_weights
from turnwise.config.resolve import load_resolved
from turnwise.config.weights import MemoryConfig
from turnwise.console import Console
from turnwise.descriptors import count_fitting, count_needed, raise_descriptor_limit
from turnwise.errors import ConfigError
from turnwise.models.inspection import inspect_model
from turnwise.protocols.command import OK
from turnwise.terminal import write_output
from turnwise.types import JsonDict
from turnwise_task_files import describe_sources, load_tasks


def print_plan(arguments: argparse.Namespace) -> int:
    """Print the placement of a config that can run, and return the exit code."""
    config, host = load_resolved(arguments.config, arguments.overrides)
    placement = plan_placement(config)
    if not arguments.placement_only:
        check_run(config, host, load_tasks(config))
    model, tasks = _describe_model(config, host), describe_sources(config)
    if arguments.json:
        plan = plan_as_json(placement, config.memory)
        plan |= {"open_files": plan_open_files(config), "model": model, "tasks": tasks}
        write_output(json.dumps(plan, indent=2) + "\n")
    else:
        Console().print(_table(placement, config.memory, model, tasks, plan_open_files(config)))
    return OK


def plan_as_json(placement: RunPlacement, memory: MemoryConfig) -> JsonDict:
    """Return the placement, and whether a trainer shares its devices, as one JSON object."""
    each = {"resources_each": dict(placement.worker_bundle), "labels": dict(placement.worker_labels)}
    return {
        "runtime": placement.runtime,
        "address": placement.address,
        "pools": [_pool_as_json(pool) for pool in placement.pools],
        "workers": {"count": placement.num_workers, **each},
        "reward_workers": {"count": placement.reward_workers, **each},
        "needs": placement.needs,
        "largest_bundle": find_largest_bundle(placement),
        "devices_per_node": placement.devices_per_node,
        "num_gpu_nodes": count_gpu_nodes(placement),
        "memory": {"mode": memory.mode, "level": memory.level if memory.mode == "hybrid" else None},
    }


def plan_open_files(config: RunConfig) -> dict[str, int]:
    """Return the descriptors that a worker needs if each of its episodes is a program, the limit, and what fits."""
    limit = raise_descriptor_limit()
    return {"needed": count_needed(config.rollout.max_in_flight), "limit": limit, "programs": count_fitting(limit)}


def find_largest_bundle(placement: RunPlacement) -> dict[str, float]:
    """Return the largest amount of each resource in one bundle. Some node must have it."""
    largest: Counter[str] = Counter()
    for pool in placement.pools:
        for bundle in pool.bundles:
            largest |= Counter(bundle)
    return dict(largest)


def count_gpu_nodes(placement: RunPlacement) -> int:
    """Return the number of nodes with `devices_per_node` GPUs that hold the replicas, packed first-fit."""
    free: list[float] = []
    amounts = [bundle.get("GPU", 0.0) for pool in placement.pools for bundle in pool.bundles * pool.num_replicas]
    for amount in sorted(filter(None, amounts), reverse=True):  # largest first packs more closely
        place = next((i for i, left in enumerate(free) if left >= amount), None)
        if place is None:
            free.append(placement.devices_per_node - amount)
        else:
            free[place] -= amount
    return len(free)


def _pool_as_json(pool: PoolPlacement) -> JsonDict:
    return {
        "name": pool.name,
        "engine": pool.engine,
        "num_replicas": pool.num_replicas,
        "max_replicas": pool.max_replicas,
        "device": pool.device,
        "devices_per_replica": pool.num_devices,
        "parallel": dict(pool.parallel),
        "bundles": [dict(bundle) for bundle in pool.bundles],
        "strategy": pool.strategy if pool.bundles else None,
        "labels": dict(pool.labels),
        "python": pool.python,
        "max_in_flight": pool.max_in_flight,
    }


def _describe_model(config: RunConfig, host: Host) -> str:
    """Return where the model is; nothing is downloaded. A machine that plans may lack the folders of the run's."""
    source = config.model_source()
    if source is None:
        return "none"
    try:
        return inspect_model(source, weights=reads_weights(host, config.engine)).text
    except ConfigError as error:
        return f"not on this machine: {error}"


def _table(
    placement: RunPlacement, memory: MemoryConfig, model: str, tasks: Sequence[str], open_files: Mapping[str, int]
) -> Table:
    table = Table(show_header=False)
    table.add_column("name", no_wrap=True)
    table.add_column("value")
    shared = f"hybrid: engines sleep at level {memory.level} while a trainer has the devices"
    kept = "standalone: engines keep their devices"
    memory_row = ("memory", shared if memory.mode == "hybrid" else kept)
    rows = [
        ("model", model),
        ("tasks", "\n".join(tasks)),
        *_pool_rows(placement),
        *_run_rows(placement),
        memory_row,
        ("open files", _open_files(**open_files)),
    ]
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _open_files(needed: int, limit: int, programs: int) -> str:
    text = f"a worker may have {limit:,}, and needs up to {needed:,} if its agents are programs"
    if needed <= limit:
        return text
    return f"{text}: {programs:,} of them fit and the others wait; lower rollout.max_in_flight or raise `ulimit -Hn`"


def _pool_rows(placement: RunPlacement) -> list[tuple[str, str]]:
    rows = []
    for pool in placement.pools:
        plural = "replica" if pool.num_replicas == 1 else "replicas"
        grows = f", up to {pool.max_replicas} as the cluster has room" if pool.max_replicas else ""
        rows.append((pool.name, f"{pool.num_replicas} {plural} of {pool.engine}{grows}"))
        if pool.parallel:
            rows.append(("  parallel", "  ".join(f"{name} {size}" for name, size in pool.parallel.items())))
        if placement.runtime == "ray":
            rows.append(("  devices each", f"{pool.num_devices:g} {pool.device}" if pool.num_devices else "none"))
            rows.append(("  bundles each", _bundles(pool)))
            if pool.labels:
                rows.append(("  on nodes with", _labels(pool.labels)))
            rows.append(("  interpreter", pool.python or "the run's own"))
    return rows if len(placement.pools) > 1 else [*rows, ("judge", "none")]


def _bundles(pool: PoolPlacement) -> str:
    if not pool.bundles:
        return "none: nothing is reserved"
    more = f" and {len(pool.bundles) - 1} of {_shown(pool.bundles[-1])}" if len(pool.bundles) > 1 else ""
    return f"{_shown(pool.bundles[0])}{more} ({pool.strategy})"


def _run_rows(placement: RunPlacement) -> list[tuple[str, str]]:
    each = f", {_shown(placement.worker_bundle)} each" if placement.worker_bundle else ""
    each += f", on nodes with {_labels(placement.worker_labels)}" if placement.worker_labels else ""
    scored = f"{placement.reward_workers}{each}" if placement.reward_workers else "none: rewards run in the workers"
    rows = [("workers", f"{placement.num_workers}{each}"), ("reward workers", scored), ("runtime", placement.runtime)]
    if placement.runtime == "ray":
        rows.append(("cluster", placement.address or "started for the run"))
        rows.append(("needs in all", _shown(placement.needs)))
        rows.append(("needs on one node", _shown(find_largest_bundle(placement))))
    num_nodes = count_gpu_nodes(placement)
    if num_nodes:
        rows.append(("nodes", f"at least {num_nodes} with {placement.devices_per_node} GPU"))
    return rows


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def _shown(bundle: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in bundle.items()) or "nothing"
