"""
What runs inside vLLM's worker processes: loads new weights from files, mends what vLLM leaves behind, and frees memory.

vLLM imports this module by name in each worker and adds the class to its own. It replaces weights layer by layer: a
layer is put together from its parts, processed as at the start, and copied over the old one. vLLM 0.32 leaves two
things undone on a CPU, where layers are repacked for its kernels: an output layer that is tied to the input's table
keeps its copy of the old numbers, and experts are not repacked.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from turnwise_vllm_engine.host_memory import HostMemory, device_bytes


class WeightLoader:
    """Methods for vLLM's `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    reload_weights: Any

    def turnwise_describe(self) -> dict[str, Any]:
        """Return which weights vLLM makes one layer of, and whether the output layer is tied to the input's table."""
        model = self.model_runner.model
        fused = [list(parts) for parts in getattr(model, "packed_modules_mapping", {}).values()]
        config = self.model_runner.model_config.hf_text_config
        return {"fused": fused, "tied": bool(getattr(config, "tie_word_embeddings", False))}

    def turnwise_load(self, paths: Sequence[str]) -> int:
        """
        Replace the weights that the files hold; return how many came.

        When that fails the model is put together again, of old and new layers, so that a later and whole update can
        succeed.
        """
        names: list[str] = []
        try:
            with _quiet("vllm.model_executor.model_loader.reload.layerwise"):
                self.reload_weights(weights_iterator=_read(paths, names))
        except BaseException:
            _put_back(self.model_runner.model)
            raise
        if importlib.import_module("vllm.platforms").current_platform.is_cpu():
            _repack(self.model_runner.model, with_experts=any(".experts." in name for name in names))
        return len(names)

    def turnwise_drop(self, level: int) -> None:
        """Free memory for a sleep on a CPU."""
        _host_memory(self).drop(level)

    def turnwise_take(self, tag: str) -> None:
        """Take memory again on a CPU: `weights` or `kv_cache`."""
        _host_memory(self).take(tag)

    def turnwise_memory(self) -> tuple[int, int]:
        """Return this process's number, and the bytes in use on its GPU."""
        return os.getpid(), device_bytes()


def _host_memory(worker: Any) -> HostMemory:
    memory: HostMemory = vars(worker).setdefault("_turnwise_memory", HostMemory(worker.model_runner))
    return memory


def _read(paths: Sequence[str], names: list[str]) -> Iterator[tuple[str, Any]]:
    safetensors = importlib.import_module("safetensors")
    for path in paths:
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                names.append(name)
                yield name, file.get_tensor(name)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a logger from telling each time of layers that have no weights, or share those of another."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _repack(model: Any, *, with_experts: bool) -> None:
    """Pack again what vLLM has packed for a CPU's kernels and does not touch when it reloads."""
    for module in model.modules():
        kind = type(module).__name__
        if kind == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        # Packing twice would scramble them.
        if kind == "RoutedExperts" and with_experts:
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def _put_back(model: Any) -> None:
    """Give every layer that was not replaced its old tensors back, and end vLLM's state of reloading."""
    layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    place = vars(layerwise)["_place_kernel_tensors"]
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            place(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
