"""
Methods that run inside vLLM's worker processes: load weights from files, and free or restore memory on a CPU.

vLLM imports this module by name in each worker and adds the class to its own worker class. vLLM reloads weights layer
by layer: it assembles a layer from its parts, processes it as at the start, and copies it over the old one. On a CPU,
where layers are repacked for the kernels, vLLM 0.32 misses two cases that `_repack` handles: an output layer that is
tied to the embedding table keeps its packed copy of the old weights, and experts are not repacked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from turnwise_engine_support.stored_weights import Place, map_weights
from turnwise_vllm_engine import copies
from turnwise_vllm_engine.host_memory import HostMemory, device_bytes


class WeightLoader:
    """Methods for vLLM's `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    reload_weights: Any
    rank: int

    def turnwise_describe(self) -> dict[str, Any]:
        """
        Return the weights that vLLM fuses, whether the output layer is tied to the embedding table, and the machine.

        The engine calls this once, before the first request.
        """
        model = self.model_runner.model
        _prepare_stage(self.model_runner)
        fused = [list(parts) for parts in getattr(model, "packed_modules_mapping", {}).values()]
        config = self.model_runner.model_config.hf_text_config
        tied = bool(getattr(config, "tie_word_embeddings", False))
        return {"fused": fused, "tied": tied, "machine": copies.machine_id()}

    def turnwise_copy(self, holders: Sequence[int], path: str, offset: int, data: bytes) -> str:
        """Keep a part of a file if this worker is a holder, and return the path of its copy."""
        return _copies(self).write(path, offset, data) if self.rank in holders else ""

    def turnwise_drop_copies(self) -> None:
        """Free the copies of files."""
        _copies(self).close()

    def turnwise_load(self, places: Sequence[Place], paths: copies.Paths) -> int:
        """
        Replace the weights at these places in files, and return their number.

        If loading fails, the model is left complete, with a mix of old and new layers, so that a whole update can
        repair it.
        """
        from vllm.platforms import current_platform

        places = copies.local_places(places, paths.get(copies.machine_id(), {}))
        try:
            with _log_errors_only("vllm.model_executor.model_loader.reload.layerwise"):
                self.reload_weights(weights_iterator=map_weights(places))
        except BaseException:
            _restore_layers(self.model_runner.model)
            raise
        if current_platform.is_cpu():
            _repack(self.model_runner.model, with_experts=any(".experts." in place[0] for place in places))
        return len(places)

    def turnwise_free(self, level: int) -> None:
        """Free memory for a sleep on a CPU."""
        _host_memory(self).free(level)

    def turnwise_restore(self, tag: str) -> None:
        """Restore the memory of `weights` or `kv_cache` on a CPU."""
        _host_memory(self).restore(tag)

    def turnwise_memory(self) -> tuple[int, int]:
        """Return the process id of this worker, and the bytes in use on its GPU."""
        return os.getpid(), device_bytes()


def _prepare_stage(runner: Any) -> None:
    """
    Allocate the buffer into which a pipeline stage receives the activations of the one before it.

    vLLM allocates it when it warms up the model. On a CPU vLLM 0.32 does not warm up a model that is not compiled and
    whose cache has a fixed size, and then fails at the first request.
    """
    from vllm.distributed.parallel_state import get_pp_group

    if get_pp_group().is_first_rank or getattr(runner, "intermediate_tensors", ...) is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _copies(worker: object) -> copies.Copies:
    kept: copies.Copies = vars(worker).setdefault("_turnwise_copies", copies.Copies())
    return kept


def _host_memory(worker: Any) -> HostMemory:
    memory: HostMemory = vars(worker).setdefault("_turnwise_memory", HostMemory(worker.model_runner))
    return memory


@contextmanager
def _log_errors_only(name: str) -> Iterator[None]:
    """Silence a logger that warns, at each update, of layers without weights or with shared ones."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _repack(model: Any, *, with_experts: bool) -> None:
    """Pack the layers for a CPU's kernels that vLLM does not repack when it reloads."""
    for module in model.modules():
        kind = type(module).__name__
        if kind == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        # Only after new experts came: packing twice would scramble them.
        if kind == "RoutedExperts" and with_experts:
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def _restore_layers(model: Any) -> None:
    """Restore the old tensors of every layer that was not replaced, and end vLLM's reloading state."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 - vLLM has no public way to undo a reload
        info.reset()
    layerwise.LOADING_LAYERS.clear()
