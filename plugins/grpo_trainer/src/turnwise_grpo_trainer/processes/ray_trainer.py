"""A trainer of several processes: Ray actors that shard the model."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from attrs import define, frozen
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it implicitly

from turnwise import RolloutBatch
from turnwise.protocols.weights import TensorSpec, Weight, WeightSource
from turnwise.weights.sources import as_numpy, source_of
from turnwise_grpo_trainer.learner.devices import gpus_per_process, select_device
from turnwise_grpo_trainer.processes.policy_weights import PolicyWeights, take_bytes
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, join_group, load_local_trainer
from turnwise_grpo_trainer.processes.trainers import LocalTrainer


def _node_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated
    return address


def open_store(host: str) -> TCPStore:
    """Listen for processes on one address, on a free port; torch itself would listen on every interface."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno())
        listener.detach()  # the store closes it
        return store


class TrainerProcess:
    """One process of the group, an actor. The driver makes every call on all processes, because they are collective."""

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int, gpu: str | None = None) -> None:
        if gpu is not None:
            # A replica has reserved this GPU, so Ray hides it from this process. Torch reads the variable at first use.
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        self._spec, self._rank, self._world_size = spec, rank, world_size
        self._store: TCPStore | None = None
        self._trainer: LocalTrainer | None = None
        self._weights: Iterator[Weight] = iter(())

    def open_rendezvous(self) -> tuple[str, int]:
        """Listen for the other processes on the address of this node; return it with the port."""
        self._store = open_store(_node_address())
        return self._store.host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Join the group and load the models."""
        device = select_device(self._spec.train.policy)
        store = self._store or TCPStore(host, port, is_master=False)
        join_group(store, rank=self._rank, world_size=self._world_size, device=device)
        self._trainer = load_local_trainer(self._spec)

    def call(self, name: str, *arguments: object, **options: object) -> Any:
        """Call a method of this process's trainer."""
        return getattr(self._trainer, name)(*arguments, **options)

    def start_weights(self, *, adapters: bool) -> tuple[TensorSpec, ...]:
        """Start an iteration over the weights, see `next_weights`, and return their specs."""
        source = self._trainer.weights(adapters=adapters) if self._trainer is not None else source_of(())
        self._weights = iter(source)
        return source.specs

    def next_weights(self, max_bytes: int) -> list[tuple[str, NDArray[Any]]]:
        """
        Take part in gathering the next weights, until they have `max_bytes` together.

        Returns:
            The weights, from the first process alone, so that they are sent once; none from the others and at the end.
        """
        taken = take_bytes(self._weights, max_bytes)
        if self._rank == 0:
            return [(name, as_numpy(weight)) for name, weight in taken]
        for _ in taken:  # each is freed when the next one is gathered
            pass
        return []


@frozen
class ReservedGpu:
    """
    A GPU that a replica has reserved and lends to a training process.

    Attributes:
        node: Ray's id of its node.
        gpu: its id on the node, as in `CUDA_VISIBLE_DEVICES`.
    """

    node: str
    gpu: str


def connect_ray(address: str | None) -> None:
    """Connect this process to a cluster, or start one, unless it is connected. It prints the lines of all actors."""
    if not ray.is_initialized():
        ray.init(address=address or "local", namespace="turnwise", include_dashboard=False)


@define(eq=False)
class RayTrainer:
    """
    The driver's handle of the processes.

    Attributes:
        processes: the actors, by rank.
        bucket_bytes: weights are gathered and sent in buckets of about this size; two of them exist at a time.
    """

    processes: list[Any]
    bucket_bytes: int = 64 * 2**20

    @classmethod
    def start(cls, spec: LearnerSpec, address: str | None, gpus: Sequence[ReservedGpu] = ()) -> RayTrainer:
        """
        Start the actors and load the models.

        Args:
            spec: the inputs of each process.
            address: of the Ray cluster, unless this process is connected to one; None starts one that ends with this
                process.
            gpus: that replicas have reserved, one for each process; empty reserves GPUs for the processes themselves.
        """
        sharding = spec.train.sharding
        connect_ray(address)
        actor, size = ray.remote(TrainerProcess), sharding.num_processes
        processes: list[Any] = []
        for rank in range(size):
            options: dict[str, object] = {
                "num_cpus": sharding.cpus_per_process,
                "num_gpus": gpus_per_process(spec.train),
            }
            if gpus:
                node = NodeAffinitySchedulingStrategy(gpus[rank].node, soft=False)
                options |= {"num_gpus": 0, "scheduling_strategy": node}
            gpu = gpus[rank].gpu if gpus else None
            processes.append(actor.options(**options).remote(spec, rank, size, gpu))
        host, port = ray.get(processes[0].open_rendezvous.remote())
        ray.get([process.join.remote(host, port) for process in processes])
        return cls(processes)

    def update(self, batch: RolloutBatch, *, step: int, version: int, lr_factor: float = 1.0) -> dict[str, float]:
        reference = ray.put(batch)
        metrics: dict[str, float] = self._call("update", reference, step=step, version=version, lr_factor=lr_factor)[0]
        return metrics

    def advantages(self) -> NDArray[Any]:
        """As in `Trainer`; all processes have the same, so only the first sends them."""
        values: NDArray[Any] = ray.get(self.processes[0].call.remote("advantages"))
        return values

    def weights(self, *, adapters: bool = False) -> WeightSource:
        """As in `Trainer`. The processes gather one bucket while another is read, and never all weights at once."""
        return PolicyWeights(self._start_weights(adapters=adapters), partial(self._read_weights, adapters=adapters))

    def _start_weights(self, *, adapters: bool) -> tuple[TensorSpec, ...]:
        started = [process.start_weights.remote(adapters=adapters) for process in self.processes]
        specs: tuple[TensorSpec, ...] = ray.get(started)[0]
        return specs

    def _read_weights(self, *, adapters: bool) -> Iterator[Weight]:
        self._start_weights(adapters=adapters)
        # The processes gather the next bucket while this one is read.
        gathering = self._gather_bucket()
        while bucket := ray.get(gathering)[0]:
            gathering = self._gather_bucket()
            yield from bucket

    def _gather_bucket(self) -> list[Any]:
        return [process.next_weights.remote(self.bucket_bytes) for process in self.processes]

    def save(self, folder: Path) -> None:
        """As in `Trainer`; the folder must be on a file system that all nodes share."""
        self._call("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._call("load", folder.absolute())

    def export(self, folder: Path) -> None:
        self._call("export", folder.absolute())

    def offload_optimizer(self) -> None:
        self._call("offload_optimizer")

    def offload_parameters(self) -> None:
        self._call("offload_parameters")

    def onload(self) -> None:
        self._call("onload")

    def memory_bytes(self) -> int:
        """Return the total of all processes."""
        return sum(self._call("memory_bytes"))

    def close(self) -> None:
        for process in self.processes:
            ray.kill(process)
        self.processes = []

    def _call(self, name: str, *arguments: object, **options: object) -> list[Any]:
        results: list[Any] = ray.get([process.call.remote(name, *arguments, **options) for process in self.processes])
        return results
