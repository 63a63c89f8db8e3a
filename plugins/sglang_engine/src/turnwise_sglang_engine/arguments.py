"""
Arguments and environment of SGLang's process, from the options and the model's directory.

Errors that can be found without SGLang are reported here, as one `ConfigError` line each.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec
from turnwise_engine_support.grammars import find_problem
from turnwise_engine_support.machine import has_gpu
from turnwise_engine_support.model_directory import check_model_directory, model_limit, model_vocab_size
from turnwise_moe_routes.shapes import read_shape
from turnwise_sglang_engine.config import SglangConfig
from turnwise_sglang_engine.grammars import BACKEND
from turnwise_sglang_engine.pictures import check_pictures

CONTEXT_MARGIN = 8
"""
Tokens by which SGLang's context is longer than ours.

SGLang refuses inputs within six tokens of its limit, and silently truncates outputs two tokens before it. With the
margin neither happens to a request that respects `max_context`.
"""
_CPU_ARGUMENTS = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "sampling_backend": "pytorch",
    # Otherwise an idle scheduler keeps a core busy.
    "sleep_on_idle": True,
}
_CPU_CONTEXTS = 8
_CPU_REQUESTS = 64


def max_context(config: SglangConfig, spec: ModelSpec) -> int:
    """Return the most tokens of context and output together: the least limit of option, model and KV cache."""
    limits = [config.max_context, model_limit(spec.path)]
    if config.max_total_tokens is not None:
        limits.append(config.max_total_tokens - CONTEXT_MARGIN)
    return max(min(limit for limit in limits if limit is not None), 1)


def resolve_device(config: SglangConfig) -> str:
    """Return `cpu` or `cuda`, without loading torch."""
    if config.device != "auto":
        return config.device
    return "cuda" if has_gpu() else "cpu"


def check_installed() -> None:
    """Raise `ConfigError` with the install command if SGLang is missing, without importing it."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "SGLang is not installed in this virtual environment: pip install 'turnwise-sglang-engine[cuda]', or for a"
            " CPU the two requirements files that the README of turnwise-sglang-engine names"
        )


def check_grammars(config: SglangConfig, spec: ModelSpec) -> None:
    """Raise `ConfigError` if the option `grammars` is set and cannot work."""
    if not config.grammars:
        return
    if problem := find_problem(spec.path):
        raise ConfigError(f"engine.grammars: {problem}")
    if name := next((name for name in config.engine_args if name.startswith("speculative_")), ""):
        raise ConfigError(f"engine.grammars excludes engine_args.{name}: drafts are not masked")


def check_routes(config: SglangConfig, spec: ModelSpec) -> None:
    """Raise `ConfigError` if the option `enable_return_routed_experts` is set and cannot work."""
    if not config.enable_return_routed_experts:
        return
    name = "engine.enable_return_routed_experts"
    if read_shape(spec.path) is None:
        raise ConfigError(f"{name}: {str(spec.path)!r} is no mixture of experts: its config.json has no experts")
    if resolve_device(config) == "cpu":
        raise ConfigError(f"{name} needs a GPU: SGLang registers the memory in which it collects them with CUDA")


def server_arguments(config: SglangConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the keyword arguments of `sglang.Engine`."""
    check_grammars(config, spec)
    check_routes(config, spec)
    if spec.path is not None:
        check_pictures(config.engine_args, spec.path)
    device = resolve_device(config)
    longest = max_context(config, spec)
    arguments: dict[str, object] = {
        "model_path": str(check_model_directory(spec, "sglang")),
        "trust_remote_code": spec.trust_remote_code,
        "dtype": "float32" if config.dtype == "auto" and device == "cpu" else config.dtype,
        "device": device,
        "context_length": longest + CONTEXT_MARGIN,
        "tp_size": config.tensor_parallel_size,
        "pp_size": config.pipeline_parallel_size,
        "dp_size": config.data_parallel_size,
        "disable_radix_cache": not config.prefix_caching,
        "skip_tokenizer_init": not (config.stop_strings or config.grammars),
        "skip_server_warmup": True,
        "grammar_backend": BACKEND if config.grammars else "none",
        "log_level": config.log_level,
        # SGLang fails a request if more ids survive its filters; all of them may.
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
    if config.enable_return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    return arguments | dict(config.engine_args)


def _memory_arguments(config: SglangConfig, device: str, longest: int) -> dict[str, Any]:
    if device == "cpu":
        tokens = config.max_total_tokens or _CPU_CONTEXTS * longest + CONTEXT_MARGIN
        return {**_CPU_ARGUMENTS, "max_running_requests": _CPU_REQUESTS, "max_total_tokens": tokens}
    arguments: dict[str, object] = {"enable_memory_saver": config.sleep_mode}
    if config.sleep_mode:
        arguments["enable_weights_cpu_backup"] = config.weights_cpu_backup
    if config.max_total_tokens is not None:
        arguments["max_total_tokens"] = config.max_total_tokens
    return arguments


def vocab_size(spec: ModelSpec) -> int:
    """Return the number of ids of the model; `ConfigError` if its directory does not say."""
    size = model_vocab_size(spec.path)
    if size is None:
        raise ConfigError(f"{str(spec.path)!r} is not a language model: its config.json has no vocab_size")
    return size


def server_environment(config: SglangConfig, num_nodes: int = 1, gpus: Sequence[str] = ()) -> dict[str, str]:
    """
    Return the environment of SGLang's processes on this node.

    Args:
        config: of the engine.
        num_nodes: nodes that the devices are on.
        gpus: ids of the GPUs that other processes have reserved for them; none if this process sees its own.
    """
    environment = dict(os.environ)
    # Only the margin exceeds the model's context, and no token ever gets a position there.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # The model is a local directory, so nothing is downloaded.
    environment.setdefault("HF_HUB_OFFLINE", "1")
    if resolve_device(config) == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # Compilation needs triton, which is not installed for a CPU. SGLang compiles for several ranks and pictures.
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
        if config.tensor_parallel_size > 1:
            _share_cores(environment, max(config.tensor_parallel_size // num_nodes, 1))
    elif gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if num_nodes > 1:
        # Otherwise the engine object of a node without requests blocks until its schedulers have ended.
        environment["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
    if config.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.num_threads)
    return environment


def _share_cores(environment: dict[str, str], num_ranks: int) -> None:
    """Assign cores to each rank. Otherwise SGLang requires a NUMA node per rank."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::num_ranks] or cores for rank in range(num_ranks)]
    environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))
