"""
Sleep on a CPU, inside vLLM's worker processes.

vLLM's own sleep needs a GPU and frees nothing on a CPU. Here every level frees the KV cache, and level 2 also frees the
weights. Level 1 leaves the weights in host memory, where they are already. Tensors stay the same objects and only
their storages are resized, so that every reference and view sees the restored memory.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
from attrs import define, field


@define(eq=False)
class HostMemory:
    """
    The memory of one worker.

    Attributes:
        runner: vLLM's model runner.
    """

    runner: Any
    _freed: dict[str, list[tuple[Any, int]]] = field(factory=dict, init=False)

    def free(self, level: int) -> None:
        """Free the KV cache, and at level 2 the weights. Idempotent."""
        if "kv_cache" not in self._freed:
            self._freed["kv_cache"] = _free_storages(self.runner.kv_caches)
        if level == 2 and "weights" not in self._freed:
            self._freed["weights"] = _free_storages(_parameters(self.runner.model))
            for module in self.runner.model.modules():
                if hasattr(module, "cpu_linear"):
                    # It holds a copy of the weights, packed for the kernel; loading new weights makes another copy.
                    module.cpu_linear = _fail_without_weights
        _trim_memory()

    def restore(self, tag: str) -> None:
        """Allocate the memory of a tag again: an empty cache, or weights of zeros. Idempotent."""
        import torch

        for storage, num_bytes in self._freed.pop(tag, ()):
            storage.resize_(num_bytes)
            # Kernels may read unwritten memory and multiply it by 0, so it must not contain NaN.
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _parameters(model: Any) -> Iterator[Any]:
    """Yield the weights that a whole update replaces. Experts are packed in place once, so they stay."""
    for module in model.modules():
        if type(module).__name__ != "RoutedExperts":
            yield from module.parameters(recurse=False)


def _free_storages(tensors: Iterable[Any]) -> list[tuple[Any, int]]:
    """Free the storages of tensors, which may share them, and return each storage with its size in bytes."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():
            storages[storage.data_ptr()] = storage, storage.nbytes()
    for storage, _ in storages.values():
        storage.resize_(0)
    return list(storages.values())


def _fail_without_weights(*_: object) -> Any:
    raise RuntimeError("the weights were freed by sleep level 2")


def _trim_memory() -> None:
    """Return freed memory to the system, which the allocator would keep."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # only glibc has it
        trim(0)


def device_bytes() -> int:
    """Return the bytes in use on this process's GPU, by all processes; 0 without a GPU."""
    import torch

    if not torch.accelerator.is_available():
        return 0
    free, total = torch.accelerator.get_memory_info()
    return int(total - free)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended or access is denied."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
