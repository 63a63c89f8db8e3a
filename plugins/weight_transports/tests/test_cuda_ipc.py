"""Weights lent by handles. Real handles need a GPU, so a fake lends tensors within one process."""

import gc
import weakref

import numpy as np
import pytest
from attrs import evolve

from turnwise.errors import EngineError
from turnwise_testing.checks.transport import ReceivingEngine, within
from turnwise_weight_transports import cuda_ipc
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
    monkeypatch.setattr(cuda_ipc, "_read_checksums", len)  # a meta tensor has no values
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


class PausingEngine:
    """Copies weights, and calls a function at some moments: before the copy of each weight, and after it."""

    def __init__(self, pause):
        self.pause, self.weights = pause, {}

    async def update_weights(self, weights, version):
        for index, (name, tensor) in enumerate(weights):
            self.pause(2 * index)
            self.weights[name] = tensor.clone()
            self.pause(2 * index + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("moment", range(-1, 7))
@pytest.mark.parametrize("changed", range(3))
def test_a_torn_read_is_refused(dtype, moment, changed):
    """An engine has exactly the weights that were published, or an error, whenever their owner changes one."""
    owned = [torch.arange(1.0, 6.0 + size).to(getattr(torch, dtype)) for size in range(3)]
    published = [tensor.clone() for tensor in owned]

    def change(now):
        if now == moment:
            owned[changed][2] = 7.0

    engine, errors = PausingEngine(change), []

    async def scenario():
        pairs = list(zip("abc", owned, strict=True))
        async with CudaIpcTransport(make_handle=unusable_handle).publish(1, pairs, 1) as manifest:
            change(-1)
            try:
                await CudaIpcTransport().apply(engine, manifest)
            except EngineError as error:
                errors.append(str(error))

    within(scenario())
    refusal = f"received weights are damaged: {'abc'[changed]!r} was changed while it was copied"
    assert errors == ([] if moment > 2 * changed + 1 else [refusal])
    if not errors:
        copies = [engine.weights[name].float().tolist() for name in "abc"]
        assert [tensor.float().tolist() for tensor in published] == copies
