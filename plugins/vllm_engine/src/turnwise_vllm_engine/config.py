"""Options of the vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen, validators

from turnwise_engine_support.arguments import engine_args_validator

_at_least_one = validators.ge(1)
_optional_at_least_one = validators.optional(_at_least_one)

OWNED_ARGUMENTS = {
    "data_parallel_size": "data_parallel_size",
    "dtype": "dtype",
    "enable_prefix_caching": "prefix_caching",
    "enable_return_routed_experts": "enable_return_routed_experts",
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
"""Arguments of vLLM that are options of this plugin, with the name of the option."""

FIXED_ARGUMENTS = frozenset({"logprobs_mode", "mm_device_do_normalize", "skip_tokenizer_init", "worker_extension_cls"})
"""Arguments of vLLM that the engine depends on, so that only the plugin sets them."""


@frozen(kw_only=True)
class VllmConfig:
    """
    Options for a model that vLLM runs.

    Attributes:
        model: model directory, instead of the run's `model.path`; its remote code is never trusted.
        dtype: of weights and KV cache; `auto` is float32 on a CPU and vLLM's choice on a GPU, which loads float32
            checkpoints as bfloat16.
        device: `cpu` or `cuda` requires that build of vLLM; `auto` uses the installed one.
        max_context: most tokens of context and output together; a smaller limit of the model wins.
        tensor_parallel_size: devices that share each layer.
        pipeline_parallel_size: groups of devices that share the layers.
        data_parallel_size: copies of the model behind this engine.
        max_num_seqs: most requests in one step; None leaves it to vLLM.
        gpu_memory_utilization: fraction of a GPU's memory for vLLM.
        kv_cache_bytes: size of the KV cache of each device; None is 1 GiB on a CPU, and on a GPU what
            `gpu_memory_utilization` leaves.
        prefix_caching: keep the full pages of finished requests for contexts with the same prefix.
        enforce_eager: disable compilation and CUDA graphs; None is true on a CPU and false on a GPU.
        sleep_mode: support sleep levels 1 and 2.
        stop_strings: load the model's tokenizer, which stop strings need; None loads it if the model has one.
        grammars: turns may have a grammar, see `turnwise.sampling.Grammar`; needs the package llguidance and a
            tokenizer.json.
        enable_return_routed_experts: return the experts that a mixture of experts chose for each token, as the column
            `routed_experts`. It needs the plugin turnwise-router-replay, `prefix_caching`, and vLLM's second model
            runner, which has no grammars.
        seed: for requests without a seed; None is 0.
        num_threads: OpenMP threads of each vLLM process; None leaves it to vLLM.
        weight_bucket_bytes: largest file of new weights.
        weight_dir: folder on whose file system new weights are written, in files without names; None is shared
            memory, or the folder for temporary files if there is none.
        engine_args: other arguments of vLLM's `AsyncEngineArgs`.
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
    grammars: bool = False
    enable_return_routed_experts: bool = False
    seed: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    num_threads: int | None = field(default=None, validator=_optional_at_least_one)
    weight_bucket_bytes: int = field(default=512 << 20, validator=_at_least_one)
    weight_dir: Path | None = None
    engine_args: Mapping[str, Any] = field(
        factory=dict, validator=engine_args_validator(OWNED_ARGUMENTS, FIXED_ARGUMENTS)
    )

    @property
    def world_size(self) -> int:
        """Number of devices that the engine needs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
