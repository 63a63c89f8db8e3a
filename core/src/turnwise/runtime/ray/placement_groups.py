"""Placement groups of a pool: one for each replica, kept over restarts and removed at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from attrs import define, field

from turnwise.errors import ConfigError
from turnwise.runtime.placement import Bundle, PoolPlacement, RunPlacement, bundle_of
from turnwise.runtime.ray.calls import first_reply
from turnwise.runtime.ray.cluster import Node, call_ray, draining_nodes
from turnwise.runtime.remote.actor_calls import ActorHandle
from turnwise.runtime.remote.supervision import ActorSlot, PlacementError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_POLL_S = 0.5
_TOLERANCE = 1e-6  # fractions of devices do not add up exactly


@define(eq=False)
class PlacementGroups:
    """The placement groups of a pool; `run_name` is part of their names."""

    pool: PoolPlacement
    run_name: str
    _groups: dict[int, PlacementGroup] = field(factory=dict, init=False)

    async def actor_options(self, index: int, timeout_s: float) -> dict[str, object]:
        """
        Reserve the resources of a replica, unless they are reserved, and return the options of its actor.

        Raises:
            PlacementError: they were not free within `timeout_s`; the text has the requested and the free resources.
        """
        labels = None if self.pool.bundles else self.pool.labels
        options = spread_options({**self.pool.resources, "labels": labels})
        if self.pool.python is not None:
            options["runtime_env"] = {"py_executable": self.pool.python}
        if not self.pool.bundles:
            return options
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = await self._group(index, timeout_s)
        options["num_cpus"] = self.pool.bundles[0].get("CPU", 0)
        # With several bundles the engine places its own processes in the group, one in each bundle.
        options["num_gpus"] = self.pool.bundles[0].get("GPU", 0) if len(self.pool.bundles) == 1 else 0
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        return options

    async def close(self, first: int = 0) -> None:
        """Remove every group from an index on. Idempotent."""
        for index in [each for each in self._groups if each >= first]:
            await self.remove(index)

    async def nodes(self, index: int) -> set[str]:
        """Return the nodes on which a replica has reserved resources."""
        return await _nodes_of(self._groups[index]) if index in self._groups else set()

    async def _group(self, index: int, timeout_s: float) -> PlacementGroup:
        from ray.util.placement_group import placement_group

        # Ray would wait forever for a node that has died, so a group on it is replaced.
        if index in self._groups and not await _is_whole(self._groups[index]):
            structlog.get_logger().warning("placement group lost", pool=self.pool.name, replica=index)
            await self.remove(index)
        if index not in self._groups:
            bundles = [dict(bundle) for bundle in self.pool.bundles]
            name = f"turnwise-{self.run_name}-{self.pool.name}-{index}"
            labels = [dict(self.pool.labels)] * len(bundles) if self.pool.labels else None

            def reserve() -> None:
                # In the thread, so that `remove_all` also finds a group whose caller was cancelled.
                self._groups[index] = placement_group(
                    bundles, strategy=self.pool.strategy, name=name, bundle_label_selector=labels
                )

            await call_ray(reserve, timeout_s)
        # A group that is not placed in time is withdrawn: it would occupy devices when the run has failed already.
        if not await _is_ready(self._groups[index], timeout_s):
            await self.remove(index)
            raise PlacementError(await self._describe_shortage(timeout_s))
        return self._groups[index]

    async def remove(self, index: int) -> None:
        """Free the resources of a replica, if there are any."""
        await call_ray(partial(self._remove, index))

    def remove_all(self) -> None:
        """Remove every group, in any thread."""
        for index in tuple(self._groups):
            self._remove(index)

    def _remove(self, index: int) -> None:
        from ray.util.placement_group import remove_placement_group

        if (group := self._groups.pop(index, None)) is None:
            return
        try:
            remove_placement_group(group)
        except Exception as error:  # noqa: BLE001 - without the cluster the group does not exist either
            structlog.get_logger().debug("placement group not removed", reason=str(error))

    async def _describe_shortage(self, timeout_s: float) -> str:
        bundle, *others = map(format_resources, self.pool.bundles)
        more = f" and {len(others)} more bundles" if others else ""
        asked = f"{bundle}{more} ({self.pool.strategy}){_format_labels(self.pool.labels)}"
        return await _describe_shortage(f"replica of the {self.pool.name}", asked, timeout_s)


async def wait_until_built(handle: ActorHandle, slot: ActorSlot, asked: Mapping[str, Any], timeout_s: float) -> None:
    """
    Wait until a new worker has been built; an error of its constructor is raised here.

    Args:
        handle: of the actor, which is killed after an error.
        slot: names the kind of the actor.
        asked: its resources, as the config has them.
        timeout_s: seconds for its start.

    Raises:
        PlacementError: no node had room for it in this time.
        TimeoutError: it was late for another reason.
    """
    try:
        await first_reply(handle, handle.check_built.remote(), timeout_s)
    except TimeoutError:
        if not asked or await _has_process(handle):
            raise
        resources = " + ".join(f"{amount:g} {name}" for name, amount in bundle_of(asked).items()) or "nothing"
        labels = _format_labels(asked.get("labels") or {})
        raise PlacementError(await _describe_shortage(slot.kind, resources + labels, timeout_s)) from None


async def _has_process(handle: Any) -> bool:
    """Return whether Ray has ever started a process for an actor; True where it cannot say."""
    import ray

    client: Any = ray.util.client.ray  # for addresses with `ray://`; it has no table of actors
    if client.is_connected():
        return True
    # The public function asks the dashboard, which a run does not start.
    table = partial(ray._private.state.state.actor_table, handle._actor_id.hex())  # noqa: SLF001 - as the line above says
    found: Mapping[str, object] = await call_ray(table)
    return found.get("Pid") != 0


async def _describe_shortage(actor: str, asked: str, timeout_s: float) -> str:
    import ray

    total: dict[str, float] = await call_ray(ray.cluster_resources)
    free: dict[str, float] = await call_ray(ray.available_resources)
    held, unused = format_resources(total), format_resources(free)
    return (
        f"no room for a {actor}: asked for {asked}, not free within {timeout_s:g} s; the cluster has {held}, of which "
        f"{unused} is free"
    )


def _format_labels(labels: Mapping[str, str]) -> str:
    return "".join(f", {name}={value}" for name, value in labels.items())


def spread_options(asked: Mapping[str, object]) -> dict[str, object]:
    """Return the options of actors with some resources, spread over the nodes that have the labels."""
    options: dict[str, object] = {"num_cpus": 0, "scheduling_strategy": "SPREAD", **asked}
    labels = options.pop("labels", None)
    return {**options, "label_selector": labels} if labels else options


async def _is_whole(group: PlacementGroup) -> bool:
    """Return whether a group is placed on live nodes that stay."""
    import ray

    nodes: list[Node] = await call_ray(ray.nodes)
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    return alive.difference(await draining_nodes()).issuperset(await _nodes_of(group))


async def _nodes_of(group: PlacementGroup) -> set[str]:
    """Return the nodes of a group; an empty name for one that is not placed."""
    from ray.util.placement_group import placement_group_table

    table: Node = await call_ray(partial(placement_group_table, group))
    return set(table["bundles_to_node_id"].values()) if table.get("state") == "CREATED" else {""}


async def _is_ready(group: PlacementGroup, timeout_s: float) -> bool:
    """Wait until a group is placed; return False after the timeout."""
    # In short steps: the thread of one long wait would outlive a run that is stopped meanwhile.
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if await call_ray(partial(group.wait, min(_POLL_S, left_s))):
            return True
    return False


def check_capacity(placement: RunPlacement, nodes: Iterable[Node]) -> None:
    """
    Check that a cluster can hold a run when nothing else uses it.

    Args:
        placement: resources of the run.
        nodes: of the cluster, as `ray.nodes` returns them.

    Raises:
        ConfigError: with the numbers in one line, if the nodes with the labels hold fewer replicas or workers.
    """
    alive = [node for node in nodes if node.get("Alive")]
    for pool in placement.pools:
        _check_room(f"replica of the {pool.name}", pool.num_replicas, pool.bundles or ({},), pool.labels, alive)
    num_workers = placement.num_workers + placement.reward_workers
    _check_room("worker", num_workers, (placement.worker_bundle,), placement.worker_labels, alive)
    for name, amount in placement.needs.items():
        if amount > (total := sum(node["Resources"].get(name, 0.0) for node in alive)) + _TOLERANCE:
            raise ConfigError(f"the run needs {amount:g} {name} in all, and the cluster has {total:g}")


def _check_room(
    actor: str, count: int, bundles: Sequence[Bundle], labels: Mapping[str, str], nodes: Sequence[Node]
) -> None:
    have = [node["Resources"] for node in nodes if _has_labels(node, labels)]
    for bundle in bundles:
        # A larger bundle takes the room of this one, too.
        needed = count * sum(_num_fitting(bundle, other, 1) > 0 for other in bundles)
        room = sum(_num_fitting(bundle, node, needed) for node in have)
        if room < needed:
            asked = ", ".join([*map("=".join, labels.items()), *(f"{each:g} {name}" for name, each in bundle.items())])
            raise ConfigError(
                f"a {actor} needs a node with {asked}, and the cluster has room for {room} of {needed}; "
                "runtime.ray.devices_per_node says how many devices a node has"
            )


def _num_fitting(bundle: Bundle, node: Bundle, most: int) -> int:
    return min((int((node.get(name, 0.0) + _TOLERANCE) // amount) for name, amount in bundle.items()), default=most)


def _has_labels(node: Node, labels: Mapping[str, str]) -> bool:
    """Return whether a node meets these labels: each value is a word or `in(one, two)`, or `!` and one of both."""
    for name, asked in labels.items():
        allowed = asked.removeprefix("!").removeprefix("in(").removesuffix(")").replace(" ", "").split(",")
        if (node.get("Labels", {}).get(name) in allowed) == asked.startswith("!"):
            return False
    return True


def format_resources(resources: Mapping[str, float]) -> str:
    """Return resources as text, without the entries that Ray generates for each node."""
    parts = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if _is_plain(name)]
    return " + ".join(parts) or "nothing"


def _is_plain(name: str) -> bool:
    return ":" not in name and "_group_" not in name and name not in ("memory", "object_store_memory")
