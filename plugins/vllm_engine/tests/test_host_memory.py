"""Sleep on a CPU: what a worker frees, and that everything which pointed there works again afterwards."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from turnwise_vllm_engine.host_memory import HostMemory, resident_bytes

MIB = 1 << 20


class Linear(torch.nn.Module):
    """A layer whose weight is used packed, as vLLM's are on a CPU."""

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
    """A cache of 64 MiB that two layers share, a model, and a buffer of it."""
    cache = torch.ones(64 * MIB, dtype=torch.uint8)
    model = torch.nn.Sequential(Linear(), RoutedExperts())
    model.register_buffer("angles", torch.arange(4.0))
    return SimpleNamespace(kv_caches=[cache[: 32 * MIB].view(-1, 1024), cache[32 * MIB :].view(-1, 1024)], model=model)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is told by /proc")
def test_level_1_frees_the_cache_alone(runner):
    """Its resident memory goes, twice is once, and it comes back empty, through all views of it."""
    memory = HostMemory(runner)
    before = resident_bytes(os.getpid())

    memory.drop(1)
    memory.drop(1)
    freed = before - resident_bytes(os.getpid())
    memory.take("weights")
    memory.take("kv_cache")
    memory.take("kv_cache")

    assert freed > 60 * MIB
    assert [0, 0] == [int(each.max()) for each in runner.kv_caches]
    runner.kv_caches[1][-1, -1] = 7
    assert 7 == int(runner.kv_caches[1].max())
    assert 1.0 == float(runner.model[0].weight.min())


def test_level_2_frees_the_weights(runner):
    """Those that an update brings again; what no update brings stays."""
    memory, weight = HostMemory(runner), runner.model[0].weight

    memory.drop(1)
    memory.drop(2)
    sizes = [each.untyped_storage().nbytes() for each in (weight, runner.model[1].weight, runner.model.angles)]
    with pytest.raises(RuntimeError, match="dropped by sleep level 2"):
        runner.model[0].cpu_linear(None, None, None)
    memory.take("weights")

    assert [0, 32, 16] == sizes
    assert (4 * MIB, 0.0) == (weight.untyped_storage().nbytes(), float(weight.abs().max()))
