"""Weights lent by handles. Real handles need a GPU, so a fake lends tensors within one process."""

import gc
import weakref

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError
from turnwise_testing.transport_checks import ReceivingEngine, within
from turnwise_weight_transports.config import CudaIpcConfig
from turnwise_weight_transports.cuda_ipc import CudaIpcTransport

torch = pytest.importorskip("torch")


class Lender:
    """Makes handles that are valid while their tensor is alive, as handles on the memory of a GPU are."""

    def __init__(self):
        self.lent = {}

    def __call__(self, tensor):
        self.lent[id(tensor)] = weakref.ref(tensor)
        return self.open, (id(tensor),)

    def open(self, key):
        tensor = self.lent[key]()
        assert tensor is not None, "the memory was freed while its handle was published"
        return tensor


def test_weights_are_lent_while_the_context_is_open():
    """The contiguous copy of a view lives until the context is left, and no longer."""
    lender, engine = Lender(), ReceivingEngine()
    weights = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2).bfloat16()}

    async def scenario():
        async with CudaIpcTransport(CudaIpcConfig(), make_handle=lender).publish(4, weights.items(), 1) as manifest:
            gc.collect()
            elsewhere = evolve(manifest, locator={**manifest.locator, "key": "of another process"})
            await CudaIpcTransport().apply(engine, elsewhere)

    within(scenario())
    assert (engine.weight_version, engine.weights["a"].tolist()) == (4, [[0, 3], [1, 4], [2, 5]])
    assert engine.weights["b"].tolist() == [1, 1]
    gc.collect()
    assert [reference() for reference in lender.lent.values()] == [None, None]


def unusable_handle(_tensor):
    """Make a handle that fails when it is opened, as CUDA's do in the process that made them."""

    def fail():
        raise RuntimeError("invalid device context")

    return fail, ()


def test_the_process_that_lends_reads_its_own_tensors():
    """A trainer and an engine in one process need no handle."""
    engine = ReceivingEngine()

    async def scenario():
        async with CudaIpcTransport(make_handle=unusable_handle).publish(3, [("a", torch.ones(2))], 1) as manifest:
            await CudaIpcTransport().apply(engine, manifest)

    within(scenario())
    assert (engine.weight_version, engine.weights["a"].tolist()) == (3, [1, 1])


def test_an_error_in_the_context_frees_the_lent_memory():
    """It is freed even while the error, whose traceback refers to the publisher, is alive."""
    lender = Lender()

    async def scenario():
        async with CudaIpcTransport(make_handle=lender).publish(1, [("a", torch.ones(3, 2).T)], 1):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        within(scenario())
    gc.collect()
    assert [reference() for reference in lender.lent.values()] == [None]
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "meta"), (False, "cpu")])
def test_an_array_is_copied_to_the_gpu(monkeypatch, has_gpu, device):
    """A restarted replica gets a copy that was kept in host memory; a tensor stays on its device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    lent = []

    async def scenario():
        transport = CudaIpcTransport(make_handle=lent.append, device="meta")
        async with transport.publish(1, [("a", np.ones(2)), ("b", torch.ones(2))], 1):
            return

    within(scenario())
    assert [device, "cpu"] == [tensor.device.type for tensor in lent]


def test_a_tensor_on_a_cpu_has_no_handle():
    """The error names the device and the option to change."""

    async def scenario():
        with pytest.raises(EngineError, match="expects tensors on a GPU, but one is on cpu: set weight_transport"):
            async with CudaIpcTransport().publish(1, [("a", torch.ones(2))], 1):
                raise AssertionError("it was published")

    within(scenario())
