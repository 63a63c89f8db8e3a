"""
Memory of a backend: frees its KV cache and weights for sleep, and restores them.

On a GPU level 1 copies the weights to host memory. On a CPU they are there already, so level 1 frees only the cache and
the decoder's own copies of weights. Level 2 also frees the weights. Tensors stay the same objects throughout; only
their storages are freed and restored.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.protocols.weights import MemoryTag
from turnwise.weights.sleep import drops_weights
from turnwise_engine_support.freed_memory import release_file_pages, return_freed_memory
from turnwise_transformers_engine.backend import Backend
from turnwise_transformers_engine.weights.adapters import AdapterMerger
from turnwise_transformers_engine.weights.served_weights import ServedWeights

_DRAIN_S = 30.0
"""Seconds that the backend may take to drop aborted requests."""


@define(eq=False)
class MemoryState:
    """
    The memory of a backend.

    All methods block, for as long as a step of the backend takes. `turnwise.weights.sleep.SleepState` has the rules.

    Attributes:
        backend: a running backend.
        served: the weights that it reads.
        adapters: those of the current weights.
        missing: names of weights that level 2 freed and that no update has loaded since.
    """

    backend: Backend
    served: ServedWeights
    adapters: AdapterMerger = field(factory=AdapterMerger, init=False)
    missing: frozenset[str] = field(default=frozenset(), init=False)
    _backup: dict[int, Any] = field(factory=dict, init=False)
    _freed_shapes: dict[int, Any] = field(factory=dict, init=False)
    _cache_freed: bool = field(default=False, init=False)
    _weights_freed: bool = field(default=False, init=False)

    def free(self, level: int) -> None:
        """Free the cache and, depending on the level, the weights; memory that is free already stays free."""
        with self._drained():
            if not self._cache_freed:
                self._cache_freed = True
                self.backend.free_cache()
            if drops_weights(level) or self.backend.model.device.type != "cpu":
                self._free_weights(backup=not drops_weights(level))
            release_file_pages(self.backend.model.parameters())
        return_freed_memory()

    def restore(self, tag: MemoryTag) -> None:
        """Allocate memory again: an empty cache, or the weights as before, or uninitialised after level 2."""
        with self.backend.paused():
            if tag == "weights":
                self._restore_weights()
            elif self._cache_freed:
                self.backend.restore_cache()
                self._cache_freed = False
            finish_writes(self.backend.model.device)

    @property
    def is_empty(self) -> bool:
        """Whether the memory of the weights is allocated and holds none."""
        return not self._weights_freed and bool(self.missing) and self.missing == self._all_names()

    def mark_loaded(self, names: Iterable[str]) -> None:
        """Remove weights from `missing`, with the weights that are tied to them."""
        if self.missing:
            state = self.backend.model.state_dict(keep_vars=True)
            loaded = {id(state[name]) for name in names}
            self.missing = frozenset(name for name in self.missing if id(state[name]) not in loaded)

    def mark_torn(self, reason: str) -> None:
        """Note, while paused, that the memory of the weights holds a mix: an update of all of them must come."""
        self.served.torn = reason
        self.missing = self._all_names()
        # W0 of later adapters would be read from the mix.
        self.adapters.bases = {}

    def _all_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.backend.model.named_parameters(remove_duplicate=False))

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Pause the backend once it has dropped every request: freed memory must not be read any more."""
        until = time.monotonic() + _DRAIN_S
        while True:
            with self.backend.paused():
                if not self.backend.has_requests():
                    yield
                    return
            if time.monotonic() > until:
                raise EngineError(f"the transformers engine still had requests {_DRAIN_S:g} s after they were aborted")
            time.sleep(0.002)

    def _free_weights(self, *, backup: bool) -> None:
        import torch

        model = self.backend.model
        # Each flag is set before memory is freed: after an error in between, a wake-up restores too much at worst.
        self._weights_freed = True
        if not backup:
            self.missing = self._all_names()
        self.backend.release_weights()
        for parameter in model.parameters():
            if id(parameter) in self._freed_shapes:
                continue
            if backup:
                self._backup[id(parameter)] = parameter.data.to("cpu", copy=True)
            self._freed_shapes[id(parameter)] = parameter.shape
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if not backup:
            self._backup.clear()

    def _restore_weights(self) -> None:
        import torch

        if not self._weights_freed:
            return
        for parameter in self.backend.model.parameters():
            key = id(parameter)
            if (shape := self._freed_shapes.get(key)) is not None:
                parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                if (backup := self._backup.get(key)) is not None:
                    parameter.data.copy_(backup)
                # Only now: a second attempt must find the memory that the first could not allocate.
                del self._freed_shapes[key]
                self._backup.pop(key, None)
        self.backend.bind_weights()
        self._weights_freed = False


def finish_writes(device: Any) -> None:
    """Wait for queued writes: on a GPU the backend computes on another stream, which would not wait for them."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def memory_bytes(device: Any) -> int:
    """Return the bytes in use: of the GPU by torch in this process, or the resident memory of this process."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
