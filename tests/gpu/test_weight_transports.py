"""Weights that stay on the device: lent by CUDA IPC within a process and to another one, and broadcast with NCCL."""

import asyncio

import numpy as np
import pytest
import torch
from gpu_support import WeightKeeper, receive_elsewhere, report, small

from turnwise.protocols.weights import WeightManifest
from turnwise.weights.sources import as_numpy, source_of
from turnwise_weight_transports import broadcast
from turnwise_weight_transports.cuda_ipc import CudaIpcTransport

NEEDS_CUDA = "cuda_ipc lends the memory of a GPU, and the device is a CPU"


def weights_on(target):
    """Return weights of three types, one of them a view that is not contiguous."""
    torch.manual_seed(0)
    weights = {
        "embed.weight": torch.randn(512, 64),
        "view.weight": torch.randn(16, 33).T,
        "norm.weight": torch.randn(64).bfloat16(),
        "head.weight": torch.randn(7, 64).half(),
    }
    return {name: tensor.to(target.name) for name, tensor in weights.items()}


def assert_arrived(weights, received):
    """Compare bit by bit, through float64."""
    assert weights.keys() == received.keys()
    for name, tensor in weights.items():
        expected = as_numpy(tensor).astype(np.float64)
        assert np.array_equal(np.asarray(received[name], np.float64), expected), name


def test_cuda_ipc_within_one_process(target):
    """The engine reads the tensors on the device."""
    if not target.is_cuda:
        pytest.skip(NEEDS_CUDA)
    weights, keeper = weights_on(target), WeightKeeper()

    async def scenario():
        async with CudaIpcTransport().publish(3, weights.items(), 1) as manifest:
            await CudaIpcTransport().apply(keeper, manifest)

    asyncio.run(scenario())
    assert_arrived(weights, keeper.weights)
    assert {each.partition(":")[0] for each in keeper.devices} == {"cuda"}


def test_cuda_ipc_across_processes(target):
    """Another process opens the handles, and reads the same numbers."""
    if not target.is_cuda:
        pytest.skip(NEEDS_CUDA)
    weights, processes = weights_on(target), torch.multiprocessing.get_context("spawn")
    manifests, results = processes.Queue(), processes.Queue()
    other = processes.Process(target=receive_elsewhere, args=(manifests, results))
    other.start()

    async def scenario():
        async with CudaIpcTransport().publish(4, weights.items(), 1) as manifest:
            manifests.put(manifest)
            return await asyncio.to_thread(results.get, timeout=150)

    received = asyncio.run(scenario())
    other.join(60)
    assert isinstance(received, dict), received
    assert_arrived(weights, received)


@small
def test_a_broadcast_of_one_rank(target):
    """The buckets of NCCL, of gloo on a CPU: packed, broadcast in a group of one, and unpacked."""
    weights, backend = weights_on(target), "nccl" if target.is_cuda else "gloo"
    source = source_of(weights)
    locator = {"num_readers": 0, "backend": backend, "bucket_bytes": 2**16, "checksum": "none", "timeout_s": 60.0}
    manifest = WeightManifest(version=1, specs=source.specs, locator=locator)
    group = broadcast._make_group(torch.distributed.HashStore(), locator, rank=0, address="127.0.0.1")
    received = {}
    with target.freed() as took:
        for bucket, tensor in broadcast._pack(manifest, source):
            broadcast._broadcast(group, tensor)
            assert tensor.device.type == target.name.partition(":")[0]
            received |= {name: as_numpy(each.clone()) for name, each in broadcast._unpack_on_device(bucket, tensor)}
    report(target, f"broadcast with {backend}, one rank: {took.seconds * 1000:.1f} ms")
    assert_arrived(weights, received)
