"""Registers the weight transports `shm`, `ray`, `disk`, `gloo`, `nccl` and `cuda_ipc`."""

from __future__ import annotations

from turnwise import Diagnostic, NoConfig, Registry, Resources, WeightTransport, hookimpl
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig, CudaIpcConfig, DiskConfig


def make_shm(config: BucketConfig, _resources: Resources) -> WeightTransport:
    """Build the transport through shared memory of one host."""
    from turnwise_weight_transports.shm import SharedMemoryTransport

    return SharedMemoryTransport(config)


def make_ray(config: BucketConfig, _resources: Resources) -> WeightTransport:
    """Build the transport through Ray's object store."""
    from turnwise_weight_transports.ray_store import RayTransport

    return RayTransport(config)


def make_disk(config: DiskConfig, _resources: Resources) -> WeightTransport:
    """Build the transport through safetensors files."""
    from turnwise_weight_transports.disk import DiskTransport

    return DiskTransport(config)


def make_gloo(config: BroadcastConfig, _resources: Resources) -> WeightTransport:
    """Build the broadcast between CPU processes."""
    from turnwise_weight_transports.broadcast import BroadcastTransport

    return BroadcastTransport(config, "gloo")


def make_nccl(config: BroadcastConfig, _resources: Resources) -> WeightTransport:
    """Build the broadcast between GPUs."""
    from turnwise_weight_transports.broadcast import BroadcastTransport

    return BroadcastTransport(config, "nccl")


def make_cuda_ipc(config: CudaIpcConfig, _resources: Resources) -> WeightTransport:
    """Build the transport by handles on the memory of one GPU."""
    from turnwise_weight_transports.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport(config)


@hookimpl
def register_weight_transports(registry: Registry[WeightTransport]) -> None:
    """Register all six transports."""
    registry.add("shm", make_shm, config=BucketConfig)
    registry.add("ray", make_ray, config=BucketConfig)
    registry.add("disk", make_disk, config=DiskConfig)
    registry.add("gloo", make_gloo, config=BroadcastConfig)
    registry.add("nccl", make_nccl, config=BroadcastConfig)
    registry.add("cuda_ipc", make_cuda_ipc, config=CudaIpcConfig)


def make_diagnostic(_config: NoConfig, _resources: Resources) -> Diagnostic:
    """Return the checks of the transports: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_weight_transports import diagnosis

    return diagnosis


@hookimpl
def register_diagnostics(registry: Registry[Diagnostic]) -> None:
    """Add the checks of the transports."""
    registry.add("weight_transports", make_diagnostic)
