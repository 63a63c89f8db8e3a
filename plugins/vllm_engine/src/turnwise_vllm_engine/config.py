"""Options of the vLLM engine. Nothing is loaded or looked up here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import Attribute, field, frozen, validators

_at_least_one = validators.ge(1)
_optional_at_least_one = validators.optional(_at_least_one)

OWNED_ARGUMENTS = {
    "data_parallel_size": "data_parallel_size",
    "dtype": "dtype",
    "enable_prefix_caching": "prefix_caching",
    "enable_sleep_mode": "sleep_mode",
    "enforce_eager": "enforce_eager",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "max_model_len": "max_context",
    "max_num_seqs": "max_num_seqs",
    "model": "model",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "revision": "model.revision",
    "seed": "seed",
    "tensor_parallel_size": "tensor_parallel_size",
    "trust_remote_code": "model.trust_remote_code",
}
"""Arguments of vLLM that are options here, with the option's name."""

FIXED_ARGUMENTS = frozenset({"logprobs_mode", "skip_tokenizer_init", "worker_extension_cls"})
"""Arguments of vLLM without which the engine would not be what it says it is."""


def _check_engine_args(_config: object, _attribute: Attribute[Any], engine_args: Mapping[str, Any]) -> None:
    for name in engine_args:
        if name in OWNED_ARGUMENTS:
            raise ValueError(f"'engine_args' must not hold {name!r}: set {OWNED_ARGUMENTS[name]}")
        if name in FIXED_ARGUMENTS:
            raise ValueError(f"'engine_args' must not hold {name!r}: the engine sets it")


@frozen(kw_only=True)
class VllmConfig:
    """
    How vLLM runs a model.

    Attributes:
        model: directory of the model, in place of the run's own; its remote code is never trusted.
        dtype: of weights and cache; `auto` is float32 on a CPU and vLLM's choice elsewhere, which makes bfloat16 of
            float32 checkpoints.
        device: `cpu` or `cuda` to insist on that build of vLLM; `auto` takes what is installed.
        max_context: most tokens of context and output together; the model's own limit when that is smaller.
        tensor_parallel_size: devices that share each layer.
        pipeline_parallel_size: groups of devices that share the layers among them.
        data_parallel_size: copies of the model behind this one engine.
        max_num_seqs: requests that sample in one step; None leaves it to vLLM.
        gpu_memory_utilization: share of a GPU's memory that vLLM takes.
        kv_cache_bytes: size of the KV cache of each device; None is 1 GiB on a CPU, and what
            `gpu_memory_utilization` leaves on a GPU.
        prefix_caching: keep full pages of finished requests for contexts that begin alike.
        enforce_eager: no compilation and no CUDA graphs; None is true on a CPU and false elsewhere.
        sleep_mode: make the sleep levels 1 and 2 possible.
        stop_strings: load the model's tokenizer so that requests may have stop strings; None does it when the
            model's directory has one.
        seed: of what requests without a seed draw; None is 0.
        num_threads: threads of OpenMP in each of vLLM's processes; None leaves it to vLLM.
        weight_bucket_bytes: most bytes of one file of new weights.
        weight_dir: folder for new weights on their way into vLLM's processes, which must all see it; None is shared
            memory, or the folder for temporary files where there is none.
        engine_args: any other argument of vLLM's `AsyncEngineArgs`.
    """

    model: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_context: int = field(default=8192, validator=validators.ge(2))
    tensor_parallel_size: int = field(default=1, validator=_at_least_one)
    pipeline_parallel_size: int = field(default=1, validator=_at_least_one)
    data_parallel_size: int = field(default=1, validator=_at_least_one)
    max_num_seqs: int | None = field(default=None, validator=_optional_at_least_one)
    gpu_memory_utilization: float = field(default=0.9, validator=[validators.gt(0), validators.le(1)])
    kv_cache_bytes: int | None = field(default=None, validator=_optional_at_least_one)
    prefix_caching: bool = True
    enforce_eager: bool | None = None
    sleep_mode: bool = True
    stop_strings: bool | None = None
    seed: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    num_threads: int | None = field(default=None, validator=_optional_at_least_one)
    weight_bucket_bytes: int = field(default=512 << 20, validator=_at_least_one)
    weight_dir: Path | None = None
    engine_args: Mapping[str, Any] = field(factory=dict, validator=_check_engine_args)

    @property
    def world_size(self) -> int:
        """Devices that this engine takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
