"""Diagnosis of the weight transports on this machine; transports that work in one process carry a few bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Final

import numpy as np

from turnwise import Finding, WeightTransport
from turnwise.errors import describe
from turnwise.protocols.weights import Weight
from turnwise_weight_transports.config import BroadcastConfig, BucketConfig, DiskConfig

_TRIAL_S: Final = 30.0
_INSTALL_TORCH: Final = "pip install 'turnwise-weight-transports[torch]'"
_NEEDS_GPU: Final = ("cuda_ipc", "nccl")


def diagnose() -> Iterator[Finding]:
    """Yield a finding for each transport."""
    yield try_transport("shm", _make_shm)
    yield try_transport("disk", _make_disk)
    if find_spec("ray") is None:
        yield Finding("ray", "missing", "Ray is not installed here", "pip install 'turnwise-weight-transports[ray]'")
    else:
        yield Finding("ray", "ok", "Ray is installed")
    if find_spec("torch") is None:
        for name in ("gloo", *_NEEDS_GPU):
            yield Finding(name, "missing", "torch is not installed here", _INSTALL_TORCH)
        return
    yield try_transport("gloo", _make_gloo)
    yield from map(partial(_gpu_finding, has_gpu=_has_gpu()), _NEEDS_GPU)


def try_transport(name: str, make: Callable[[], WeightTransport]) -> Finding:
    """Return whether a transport carries weights inside this process, by a real transfer."""
    try:
        asyncio.run(asyncio.wait_for(_transfer(make()), _TRIAL_S))
    except Exception as error:  # noqa: BLE001 - every failure is a finding
        return Finding(name, "broken", f"a trial transfer failed: {describe(error)}")
    return Finding(name, "ok", "a trial transfer succeeded")


def _make_shm() -> WeightTransport:
    from turnwise_weight_transports.shm import SharedMemoryTransport

    return SharedMemoryTransport(BucketConfig())


def _make_disk() -> WeightTransport:
    from turnwise_weight_transports.disk import DiskTransport

    return DiskTransport(DiskConfig())


def _make_gloo() -> WeightTransport:
    from turnwise_weight_transports.broadcast import BroadcastTransport

    return BroadcastTransport(BroadcastConfig(), "gloo")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu_finding(name: str, *, has_gpu: bool) -> Finding:
    if has_gpu:
        return Finding(name, "ok", "torch can use a GPU")
    return Finding(name, "limited", "needs a GPU, and torch can use none", "choose another weight_transport")


class _Target:
    """Receives weights and keeps the sum of each."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        # In a thread, as engines do: some transports fill the stream from the event loop.
        self.sums = await asyncio.to_thread(lambda: {name: float(array.sum()) for name, array in weights})


async def _transfer(transport: WeightTransport) -> None:
    target = _Target()
    async with transport.publish(1, [("w", np.arange(4, dtype=np.float32))], 1) as manifest:
        await transport.apply(target, manifest)
    await transport.close()
    if target.sums != {"w": 6.0}:
        raise ValueError(f"sent a weight with the sum 6, received the sums {target.sums}")
