"""
Sleep on a CPU, inside vLLM's worker processes.

vLLM's own sleep needs a GPU: on a CPU it frees nothing. Here the memory of the KV cache goes at every level, and that
of the weights at level 2; at level 1 they stay, as host memory is where level 1 keeps them. Tensors remain the same
objects throughout, so that all who hold them, and views of them, see the new memory after waking up.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
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
    _dropped: dict[str, list[tuple[Any, int]]] = field(factory=dict, init=False)

    def drop(self, level: int) -> None:
        """Free the KV cache, and at level 2 the weights; what was freed already is left alone."""
        if "kv_cache" not in self._dropped:
            self._dropped["kv_cache"] = _freed(self.runner.kv_caches)
        if level == 2 and "weights" not in self._dropped:
            self._dropped["weights"] = _freed(_parameters(self.runner.model))
            for module in self.runner.model.modules():
                if hasattr(module, "cpu_linear"):
                    # It holds a copy of the weights that is packed for the kernel; loading new ones makes another.
                    module.cpu_linear = _no_weights
        _give_back()

    def take(self, tag: str) -> None:
        """Take the memory of a tag again: an empty cache, or weights without numbers. Harmless when it is there."""
        torch = importlib.import_module("torch")
        for storage, num_bytes in self._dropped.pop(tag, ()):
            storage.resize_(num_bytes)
            # Kernels may read, and weigh with 0, what nobody has written: it must not be NaN.
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()


def _parameters(model: Any) -> Iterator[Any]:
    """Yield what a whole update brings again; experts are packed in place, once, and stay."""
    for module in model.modules():
        if type(module).__name__ != "RoutedExperts":
            yield from module.parameters(recurse=False)


def _freed(tensors: Iterable[Any]) -> list[tuple[Any, int]]:
    """Free the memory behind tensors, which may share it; return it with its sizes."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():
            storages[storage.data_ptr()] = storage, storage.nbytes()
    for storage, _ in storages.values():
        storage.resize_(0)
    return list(storages.values())


def _no_weights(*_: Any) -> Any:
    raise RuntimeError("the weights were dropped by sleep level 2")


def _give_back() -> None:
    """Return what was freed to the system; the allocator keeps it for itself otherwise."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc alone has it
        trim(0)


def device_bytes() -> int:
    """Return what is in use on this process's GPU, by whomever; 0 without one."""
    torch = importlib.import_module("torch")
    if not torch.accelerator.is_available():
        return 0
    free, total = torch.accelerator.get_memory_info()
    return int(total - free)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 when it has ended or may not be looked at."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
