"""
A manager that sleeps: its cache and its weights give their memory back, and take it again.

On a GPU level 1 copies the weights to host memory. On a CPU they are there already, so level 1 frees the cache alone;
level 2 drops the weights as well. Tensors stay the same objects throughout; only what they point to comes and goes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from attrs import define, field

from turnwise.errors import EngineError

TAGS = ("weights", "kv_cache")
_DRAIN_S = 30.0
"""How long the manager gets to let go of requests that were aborted."""


@define(eq=False)
class Residence:
    """
    What of a manager's memory is there.

    All methods but the properties block, on a thread of their own, for as long as a step of the manager takes.

    Attributes:
        manager: a running manager.
        level: how deep it sleeps; 0 when nothing does.
        awake: tags whose memory is there.
        missing: names of weights that level 2 dropped and no update has brought since.
    """

    manager: Any
    level: int = field(default=0, init=False)
    awake: set[str] = field(factory=lambda: set(TAGS), init=False)
    missing: frozenset[str] = field(default=frozenset(), init=False)
    _kept: dict[int, Any] = field(factory=dict, init=False)
    _shapes: dict[int, Any] = field(factory=dict, init=False)
    _cache_bytes: int = field(default=0, init=False)

    @property
    def why_not(self) -> str:
        """Why requests cannot be served; empty when they can."""
        if len(self.awake) < len(TAGS):
            return f"is asleep (level {self.level}): wake up {', '.join(t for t in TAGS if t not in self.awake)}"
        if self.missing:
            return f"lacks {len(self.missing)} weights, which sleep level 2 dropped: update the weights"
        return ""

    def sleep(self, level: int) -> None:
        """Free the cache, and by the level the weights; deeper than before when it slept already."""
        with self._idle():
            if "kv_cache" in self.awake:
                self._drop_cache()
            if level == 2 or self.manager.model.device.type != "cpu":
                self._drop_weights(keep=level == 1)
            self.awake.clear()
            self.level = max(self.level, level)
        give_back()

    def wake_up(self, tags: Iterable[str]) -> None:
        """Take memory again; the cache comes back empty, the weights as they were, or unset after level 2."""
        with self.manager.pause():
            if "weights" in tags and "weights" not in self.awake:
                self._take_weights()
                self.awake.add("weights")
            if "kv_cache" in tags and "kv_cache" not in self.awake:
                cache = self.manager.batch_processor.cache
                cache.cache_tensor.untyped_storage().resize_(self._cache_bytes)
                cache.cache_tensor.zero_()
                self.awake.add("kv_cache")
        if len(self.awake) == len(TAGS):
            self.level = 0

    def brought(self, names: Iterable[str]) -> None:
        """Count weights as there again; tied ones come together."""
        if self.missing:
            state = self.manager.model.state_dict(keep_vars=True)
            there = {id(state[name]) for name in names}
            self.missing = frozenset(name for name in self.missing if id(state[name]) not in there)

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Hold the manager still once it has let go of every request: what is freed must not be read any more."""
        until = time.monotonic() + _DRAIN_S
        while True:
            with self.manager.pause():
                queues = self.manager.input_queue, self.manager.cancel_queue
                scheduler = self.manager.batch_processor.scheduler
                if not scheduler.has_pending_requests() and all(queue.empty() for queue in queues):
                    yield
                    return
            if time.monotonic() > until:
                raise EngineError(f"the manager did not let go of its requests within {_DRAIN_S:g} s")
            time.sleep(0.002)

    def _drop_cache(self) -> None:
        cache = self.manager.batch_processor.cache
        cache.evict_cached_blocks()
        importlib.import_module(f"{__package__}.paged_step").forget(cache)
        storage = cache.cache_tensor.untyped_storage()
        self._cache_bytes = storage.nbytes()
        storage.resize_(0)

    def _drop_weights(self, *, keep: bool) -> None:
        torch = importlib.import_module("torch")
        model = self.manager.model
        for parameter in model.parameters():
            if keep and id(parameter) not in self._kept:
                self._kept[id(parameter)] = parameter.data.to("cpu", copy=True)
            self._shapes.setdefault(id(parameter), parameter.shape)
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if not keep:
            self._kept.clear()
            self.missing = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))

    def _take_weights(self) -> None:
        torch = importlib.import_module("torch")
        for parameter in self.manager.model.parameters():
            if (shape := self._shapes.pop(id(parameter), None)) is not None:
                parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                if (kept := self._kept.pop(id(parameter), None)) is not None:
                    parameter.data.copy_(kept)


def give_back() -> None:
    """Return freed memory to the device, or to the system: an allocator keeps it for itself otherwise."""
    gc.collect()
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        if trim is not None:
            trim(0)


def memory_bytes(device: Any) -> int:
    """Return the bytes in use: of the GPU by torch in this process, or the resident memory of this process."""
    if device.type == "cuda":
        return int(importlib.import_module("torch").cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
