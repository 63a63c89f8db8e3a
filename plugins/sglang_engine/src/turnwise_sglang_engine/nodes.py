"""
A replica whose devices are on several nodes of a Ray cluster, or in several bundles of one node.

SGLang runs one server on each node. The engine's process runs the first one; this module starts the others. An actor in
every bundle reserves the device there. The first actor of each other node also runs the server of its node. Ray is
imported only by a process that has connected to it.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from attrs import define, evolve, field, frozen

from turnwise.errors import EngineError
from turnwise_engine_support.error_lines import error_line
from turnwise_engine_support.machine import has_gpu
from turnwise_sglang_engine import arguments
from turnwise_sglang_engine.config import SglangConfig
from turnwise_sglang_engine.frames import Frame
from turnwise_sglang_engine.process import ServerProcess


@frozen
class Device:
    """
    The device of a bundle, as the process that reserves it sees it.

    Attributes:
        node: id of the node in Ray.
        gpus: ids of the reserved GPUs.
        has_gpu: whether a process there can use a GPU.
    """

    node: str
    gpus: tuple[str, ...] = ()
    has_gpu: bool = False


class BundleActor:
    """Reserves the device of a bundle, and runs SGLang's server of its node if it is the first of another node."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None
        self._lost = asyncio.Event()

    async def locate(self) -> Device:
        """Return the device."""
        import ray

        gpus = tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
        node = ray.get_runtime_context().get_node_id()
        return Device(node, gpus, has_gpu())

    async def start(self, settings: dict[str, Any], config: SglangConfig, num_nodes: int, gpus: Sequence[str]) -> str:
        """Start the server, and return when it is ready: an empty text, or why it did not start."""
        self._server = ServerProcess(_ignore, self._lost.set)
        environment = arguments.server_environment(config, num_nodes, gpus)
        try:
            await self._server.start(settings, environment, config.start_timeout_s)
        except EngineError as error:
            # As a text: Ray would wrap the exception in its own, with the traceback in the message.
            self._server.kill()
            return str(error)
        return ""

    async def watch(self) -> str:
        """Wait until the server has ended, and return the last error of its log."""
        await self._lost.wait()
        return self._server.cause() if self._server is not None else ""

    async def stop(self) -> None:
        """Stop the server."""
        if self._server is not None:
            await self._server.stop()


def _ignore(_frame: Frame) -> None:
    """Do nothing: the server of another node sends no frame after its first."""


@define(eq=False)
class Nodes:
    """
    The nodes of a replica.

    Attributes:
        config: of the engine, with the device that the actors have found.
        actors: in every bundle.
        followers: the actor that runs the server, and the GPUs, of each node but the engine's own.
        gpus: ids of the GPUs on the engine's own node.
        address: host and port of the engine's process, where the servers meet.
    """

    config: SglangConfig
    actors: Sequence[Any] = ()
    followers: Sequence[tuple[Any, Sequence[str]]] = ()
    gpus: Sequence[str] = ()
    address: str = ""
    _ended: bool = field(default=False, init=False)

    @property
    def number(self) -> int:
        """Number of nodes."""
        return 1 + len(self.followers)

    def settings(self, settings: Mapping[str, object], rank: int) -> dict[str, Any]:
        """Return the arguments of the server of a node."""
        if self.number == 1:
            return dict(settings)
        return {**settings, "nnodes": self.number, "node_rank": rank, "dist_init_addr": self.address}

    def environment(self) -> dict[str, str]:
        """Return the environment of the server of the engine's own node."""
        return arguments.server_environment(self.config, self.number, self.gpus)

    def starts(self, settings: Mapping[str, object]) -> list[Coroutine[Any, Any, None]]:
        """Return coroutines that start the servers of the other nodes; each raises `EngineError` if one fails."""
        return [
            self._start(actor, self.settings(settings, rank), gpus)
            for rank, (actor, gpus) in enumerate(self.followers, start=1)
        ]

    async def _start(self, actor: Any, settings: dict[str, Any], gpus: Sequence[str]) -> None:
        try:
            error = await actor.start.remote(settings, self.config, self.number, gpus)
        except Exception as failure:  # noqa: BLE001 - Ray raises many kinds when an actor or its node has died
            error = error_line(failure)
        if error:
            raise EngineError(f"on another node: {error}")

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call a function, on the running event loop, when a server of another node has ended, with the reason."""
        loop = asyncio.get_running_loop()

        def ended(call: Future[str]) -> None:
            failure = call.exception()
            # The loop is closed if the engine was never stopped.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(on_end, call.result() if failure is None else error_line(failure))

        for actor, _ in self.followers:
            actor.watch.remote().future().add_done_callback(ended)

    async def stop(self) -> None:
        """Stop the servers of the other nodes, and free the devices. Idempotent."""
        for call in [] if self._ended else [actor.stop.remote() for actor, _ in self.followers]:
            # An actor that has died has no server to stop.
            with suppress(Exception):
                await call
        self.kill()

    def kill(self) -> None:
        """End the actors at once; their servers notice and end themselves. Idempotent."""
        if self._ended or not self.actors:
            return
        self._ended = True
        import ray

        for actor in self.actors:
            # Without the cluster there is no actor either.
            with suppress(Exception):
                ray.kill(actor)


async def find_nodes(config: SglangConfig) -> Nodes:
    """
    Return the nodes of this replica: one, unless its placement group has a bundle for each of its devices.

    Raises:
        EngineError: SGLang cannot divide the model over these nodes.
    """
    # In a thread: Ray asks its server for the bundles, and waits.
    group, bundles = await asyncio.to_thread(_own_group, config)
    if not bundles:
        return Nodes(config)
    actors = [_place(group, index, bundle) for index, bundle in enumerate(bundles)]
    try:
        async with asyncio.timeout(config.start_timeout_s):
            calls = [actor.locate.remote() for actor in actors]
            devices: list[Device] = [await call for call in calls]
        return _arrange(config, actors, devices)
    except BaseException as error:
        Nodes(config, actors).kill()
        if isinstance(error, TimeoutError):
            text = f"no device within {config.start_timeout_s} s in the placement group (start_timeout_s)"
            raise EngineError(text) from None
        raise


def _own_group(config: SglangConfig) -> tuple[Any, list[Mapping[str, float]]]:
    """Return the placement group of this process and its bundles; none unless each device of the engine has one."""
    if "ray" not in sys.modules or config.world_size == 1:
        return None, []
    import ray
    from ray.util import get_current_placement_group

    group = get_current_placement_group() if ray.is_initialized() else None
    bundles: list[Mapping[str, float]] = list(group.bundle_specs) if group is not None else []
    return group, bundles if len(bundles) == config.world_size else []


def _place(group: Any, index: int, bundle: Mapping[str, float]) -> Any:
    """Start the actor of a bundle. It ends with this process, which owns it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    options = {"num_cpus": 0, "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
    return ray.remote(BundleActor).options(**options).remote()


def _arrange(config: SglangConfig, actors: Sequence[object], devices: Sequence[Device]) -> Nodes:
    """Divide the actors by nodes, the own one first."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    found: dict[str, list[int]] = {own: []}
    for index, device in enumerate(devices):
        found.setdefault(device.node, []).append(index)
    check_division(config, [len(indices) for indices in found.values()])
    gpus = {node: [gpu for index in indices for gpu in devices[index].gpus] for node, indices in found.items()}
    if config.device == "auto":
        # Ray hides the GPUs from this process, because the bundles reserve them for the actors.
        config = evolve(config, device="cuda" if all(device.has_gpu for device in devices) else "cpu")
    followers = [(actors[indices[0]], gpus[node]) for node, indices in found.items() if node != own]
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it so
    address = f"{f'[{host}]' if ':' in host else host}:{_free_port()}"
    return Nodes(config, actors, followers, gpus[own], address)


def check_division(config: SglangConfig, per_node: Sequence[int]) -> None:
    """Raise `EngineError` if SGLang cannot divide the model over nodes with these numbers of devices."""
    if len(per_node) == 1:
        return
    where = ", ".join(map(str, per_node))
    if config.data_parallel_size > 1:
        raise EngineError(
            f"SGLang keeps all copies of data_parallel_size on one node, and the devices are on {len(per_node)} nodes "
            f"({where}): set data_parallel_size to 1 and raise the number of replicas"
        )
    if len(set(per_node)) > 1:
        raise EngineError(
            f"SGLang needs as many devices on each node, and the nodes of this replica have {where}: "
            "choose parallel sizes that fill whole nodes"
        )
    # SGLang divides a pipeline by whole stages, and a stage by whole nodes.
    stages, nodes = config.pipeline_parallel_size, len(per_node)
    if stages % nodes and nodes % stages:
        raise EngineError(
            f"SGLang cannot divide {stages} pipeline stages over {nodes} nodes: "
            "let one number be a multiple of the other"
        )


def _free_port() -> int:
    """Return a port that is free now: SGLang has no way to choose one itself and tell the other nodes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
