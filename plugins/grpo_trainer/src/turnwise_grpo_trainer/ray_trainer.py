"""A trainer of several processes: Ray actors that shard the model among them."""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from attrs import define
from numpy.typing import NDArray

from turnwise import RolloutBatch
from turnwise_grpo_trainer.sharding import LearnerSpec, gpus_each, join_group
from turnwise_grpo_trainer.trainers import LocalTrainer

if TYPE_CHECKING:
    from turnwise_grpo_trainer.setup import Setup


def _own_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated
    return address


class TrainerProcess:
    """One process of the group; the methods are those of `Trainer`, and all processes are called alike."""

    def __init__(self, spec: LearnerSpec, rank: int, world_size: int) -> None:
        """Remember what to be."""
        self._spec, self._rank, self._world_size = spec, rank, world_size
        self._trainer: LocalTrainer | None = None
        self._weights: Iterator[tuple[str, NDArray[Any]]] = iter(())

    def address(self) -> str:
        """Return where the group can meet: this node, at a port that is free."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{_own_address()}:{probe.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Join the group and load the models."""
        from turnwise_grpo_trainer.models import device_of

        join_group(address, rank=self._rank, world_size=self._world_size, device=device_of(self._spec.train.policy))
        self._trainer = self._spec.trainer()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of this process's trainer."""
        return getattr(self._trainer, name)(*arguments, **options)

    def begin_weights(self) -> None:
        """Get ready to hand out weights."""
        if self._trainer is not None:
            self._weights = self._trainer.weights()

    def next_weight(self) -> tuple[str, NDArray[Any]] | bool:
        """Take part in gathering the next weight; the first process returns it, the others that there was one."""
        weight = next(self._weights, None)
        return weight is not None if self._rank or weight is None else weight


@define(eq=False)
class RayTrainer:
    """
    The driver's handle of the group.

    Attributes:
        processes: the actors, by rank.
    """

    processes: list[Any]

    @classmethod
    def start(cls, setup: Setup) -> RayTrainer:
        """Start the actors, on the run's cluster or on one that ends with this process, and load the models."""
        sharding = setup.train.sharding
        if not ray.is_initialized():
            address = setup.run.runtime.ray.address or "local"
            ray.init(address=address, namespace="turnwise", include_dashboard=False, log_to_driver=False)
        reserved = {"num_cpus": sharding.cpus_per_process, "num_gpus": gpus_each(setup.train)}
        actor = ray.remote(TrainerProcess).options(**reserved)
        spec, size = LearnerSpec.of(setup), sharding.num_processes
        processes: list[Any] = [actor.remote(spec, rank, size) for rank in range(size)]
        address = ray.get(processes[0].address.remote())
        ray.get([process.join.remote(address) for process in processes])
        return cls(processes)

    def update(self, batch: RolloutBatch, *, step: int, version: int) -> dict[str, float]:
        """Learn from a batch, in all processes; the numbers are the same in each."""
        reference = ray.put(batch)
        numbers: dict[str, float] = self._call("update", reference, step=step, version=version)[0]
        return numbers

    def weights(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the policy's weights, gathered one at a time."""
        ray.get([process.begin_weights.remote() for process in self.processes])
        while True:
            first, *_ = ray.get([process.next_weight.remote() for process in self.processes])
            if first is False:
                return
            yield first

    def save(self, folder: Path) -> None:
        """Write what training goes on from; the folder must be one that all nodes see."""
        self._call("save", folder.absolute())

    def load(self, folder: Path) -> None:
        """Stand where `save` was called."""
        self._call("load", folder.absolute())

    def export(self, folder: Path) -> None:
        """Write the policy with its tokenizer."""
        self._call("export", folder.absolute())

    def offload_optimizer(self) -> None:
        """Take optimizer states and gradients off the devices."""
        self._call("offload_optimizer")

    def offload_parameters(self) -> None:
        """Take weights off the devices."""
        self._call("offload_parameters")

    def onload(self) -> None:
        """Bring weights and optimizer states back."""
        self._call("onload")

    def memory_bytes(self) -> int:
        """Return how many bytes all processes hold on their devices."""
        return sum(self._call("memory_bytes"))

    def close(self) -> None:
        """End the actors."""
        for process in self.processes:
            ray.kill(process)
        self.processes = []

    def _call(self, name: str, *arguments: Any, **options: Any) -> list[Any]:
        answers: list[Any] = ray.get([process.call.remote(name, *arguments, **options) for process in self.processes])
        return answers
