"""Sleep on a CPU: the memory that a worker frees, and that all references to it work again afterwards."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from turnwise_vllm_engine.host_memory import HostMemory, resident_bytes

MIB = 1 << 20


class Linear(torch.nn.Module):
    """A layer with a packed weight, as vLLM has on a CPU."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, MIB // 64), requires_grad=False)
        self.cpu_linear = torch.nn.functional.linear


class RoutedExperts(torch.nn.Module):
    """A layer that vLLM packs once, in place."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8), requires_grad=False)


@pytest.fixture
def runner():
    """A cache of 64 MiB that two layers share, and a model with a buffer."""
    cache = torch.ones(64 * MIB, dtype=torch.uint8)
    model = torch.nn.Sequential(Linear(), RoutedExperts())
    model.register_buffer("angles", torch.arange(4.0))
    return SimpleNamespace(kv_caches=[cache[: 32 * MIB].view(-1, 1024), cache[32 * MIB :].view(-1, 1024)], model=model)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory comes from /proc")
def test_level_1_frees_only_the_cache(runner):
    """Freeing twice is harmless, and the restored cache is empty in all views of it."""
    memory = HostMemory(runner)
    before = resident_bytes(os.getpid())

    memory.free(1)
    memory.free(1)
    freed = before - resident_bytes(os.getpid())
    memory.restore("weights")
    memory.restore("kv_cache")
    memory.restore("kv_cache")

    assert freed > 60 * MIB
    assert [0, 0] == [int(each.max()) for each in runner.kv_caches]
    runner.kv_caches[1][-1, -1] = 7
    assert 7 == int(runner.kv_caches[1].max())
    assert 1.0 == float(runner.model[0].weight.min())


def test_level_2_frees_the_weights(runner):
    """Buffers and experts stay, because no update sends them."""
    memory, weight = HostMemory(runner), runner.model[0].weight

    memory.free(1)
    memory.free(2)
    sizes = [each.untyped_storage().nbytes() for each in (weight, runner.model[1].weight, runner.model.angles)]
    with pytest.raises(RuntimeError, match="freed by sleep level 2"):
        runner.model[0].cpu_linear(None, None, None)
    memory.restore("weights")

    assert [0, 32, 16] == sizes
    assert (4 * MIB, 0.0) == (weight.untyped_storage().nbytes(), float(weight.abs().max()))
