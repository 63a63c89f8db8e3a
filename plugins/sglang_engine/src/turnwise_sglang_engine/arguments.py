"""
What SGLang is started with: its arguments, its environment and the model, from the options.

All that can be said about options and directory without SGLang is said here, as one `EngineError` line each.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from turnwise.errors import EngineError
from turnwise.protocols import ModelSpec, Resources
from turnwise_sglang_engine.config import SglangConfig

CONTEXT_MARGIN = 8
"""
Tokens by which SGLang's context is longer than ours.

It refuses inputs from six below its limit on, and clips outputs two below, without a word. With the margin neither
happens to a request that stays within `max_context`.
"""
_CPU_ARGUMENTS = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "sampling_backend": "pytorch",
    # Without it a scheduler that has nothing to do keeps a core busy.
    "sleep_on_idle": True,
}
_CPU_CONTEXTS = 8
_CPU_REQUESTS = 64


def model_spec(config: SglangConfig, resources: Resources) -> ModelSpec:
    """Return which model to load: the engine's own, without the trust that was given to the run's, or the run's."""
    if config.model is not None and config.model != resources.model.path:
        return ModelSpec(path=config.model)
    return resources.model


def model_config(path: Path | None) -> dict[str, Any]:
    """Return what the model's directory says about it, empty when it says nothing."""
    try:
        config = json.loads(((path or Path()) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config", config)
    return text if isinstance(text, dict) else {}


def max_context(config: SglangConfig, spec: ModelSpec) -> int:
    """Return the most tokens of context and output together: the least of option, model and KV cache."""
    limits = [config.max_context]
    if isinstance(limit := model_config(spec.path).get("max_position_embeddings"), int) and limit > 0:
        limits.append(limit)
    if config.max_total_tokens is not None:
        limits.append(config.max_total_tokens - CONTEXT_MARGIN)
    return max(min(limits), 1)


def resolve_device(config: SglangConfig) -> str:
    """Return `cpu` or `cuda`; `auto` looks for a GPU's driver, without loading torch."""
    if config.device != "auto":
        return config.device
    hidden = any(os.environ.get(name, "0").strip() in ("", "-1") for name in _VISIBLE)
    return "cuda" if not hidden and any(Path(path).exists() for path in _DRIVERS) else "cpu"


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/kfd")


def checked_directory(spec: ModelSpec) -> Path:
    """Return the model's directory; `EngineError` when there is none, or no model in it."""
    if spec.path is None:
        raise EngineError("the sglang engine has no model: set model.path, or 'model' of the engine")
    if not spec.path.is_dir():
        raise EngineError(f"the model directory {str(spec.path)!r} does not exist")
    if not (spec.path / "config.json").is_file():
        raise EngineError(f"{str(spec.path)!r} is no model directory: it has no config.json")
    return spec.path


def check_installed() -> None:
    """Raise `EngineError` with what to do when SGLang is not there, without importing it."""
    if importlib.util.find_spec("sglang") is None:
        raise EngineError(
            "the sglang engine needs SGLang: pip install 'turnwise-sglang-engine[cuda]', or for a CPU the two"
            " requirement files that its README names"
        )


def server_arguments(config: SglangConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the keyword arguments of `sglang.Engine`."""
    device = resolve_device(config)
    longest = max_context(config, spec)
    arguments: dict[str, Any] = {
        "model_path": str(checked_directory(spec)),
        "trust_remote_code": spec.trust_remote_code,
        "dtype": "float32" if config.dtype == "auto" and device == "cpu" else config.dtype,
        "device": device,
        "context_length": longest + CONTEXT_MARGIN,
        "tp_size": config.tensor_parallel_size,
        "pp_size": config.pipeline_parallel_size,
        "dp_size": config.data_parallel_size,
        "disable_radix_cache": not config.prefix_caching,
        "skip_tokenizer_init": not config.stop_strings,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "log_level": config.log_level,
        # The whole vocabulary may survive a filter, and a request must not die of that.
        "sampling_mask_max_tokens": vocab_size(spec),
        "weight_version": "0",
    }
    arguments |= _memory_arguments(config, device, longest)
    optional = {
        "max_running_requests": config.max_running_requests,
        "mem_fraction_static": config.mem_fraction_static,
        "random_seed": config.seed,
        "revision": spec.revision,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    return arguments | dict(config.engine_args)


def _memory_arguments(config: SglangConfig, device: str, longest: int) -> dict[str, Any]:
    if device == "cpu":
        tokens = config.max_total_tokens or _CPU_CONTEXTS * longest + CONTEXT_MARGIN
        return {**_CPU_ARGUMENTS, "max_running_requests": _CPU_REQUESTS, "max_total_tokens": tokens}
    arguments: dict[str, Any] = {"enable_memory_saver": config.sleep_mode}
    if config.sleep_mode:
        arguments["enable_weights_cpu_backup"] = config.weights_cpu_backup
    if config.max_total_tokens is not None:
        arguments["max_total_tokens"] = config.max_total_tokens
    return arguments


def vocab_size(spec: ModelSpec) -> int:
    """Return how many ids the model can read and sample; `EngineError` when its directory does not say."""
    size = model_config(spec.path).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise EngineError(f"{str(spec.path)!r} is no language model: its config.json has no vocab_size")
    return size


def server_environment(config: SglangConfig) -> dict[str, str]:
    """Return the environment of SGLang's processes."""
    environment = dict(os.environ)
    # Our context is at most the model's; only the margin is beyond it, and no token ever stands there.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # The model is a directory; nothing of it is looked for elsewhere.
    environment.setdefault("HF_HUB_OFFLINE", "1")
    if resolve_device(config) == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if config.tensor_parallel_size > 1:
            _share_cores(environment, config.tensor_parallel_size)
    if config.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.num_threads)
    return environment


def _share_cores(environment: dict[str, str], num_ranks: int) -> None:
    """Give each rank its own cores: SGLang asks for a NUMA node per rank unless it is told which cores are whose."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::num_ranks] or cores for rank in range(num_ranks)]
    environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))
    # Compilation needs triton, which a CPU does not have.
    environment.setdefault("TORCH_COMPILE_DISABLE", "1")
