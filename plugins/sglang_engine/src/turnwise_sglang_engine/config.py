"""Options of the SGLang engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen, validators

from turnwise_engine_support.arguments import engine_args_validator

_at_least_one = validators.ge(1)
_optional_at_least_one = validators.optional(_at_least_one)

OWNED_ARGUMENTS = {
    "context_length": "max_context",
    "device": "device",
    "disable_radix_cache": "prefix_caching",
    "dp_size": "data_parallel_size",
    "dtype": "dtype",
    "enable_memory_saver": "sleep_mode",
    "enable_return_routed_experts": "enable_return_routed_experts",
    "enable_weights_cpu_backup": "weights_cpu_backup",
    "log_level": "log_level",
    "max_running_requests": "max_running_requests",
    "max_total_tokens": "max_total_tokens",
    "mem_fraction_static": "mem_fraction_static",
    "model_path": "model",
    "pp_size": "pipeline_parallel_size",
    "random_seed": "seed",
    "revision": "model.revision",
    "tp_size": "tensor_parallel_size",
    "trust_remote_code": "model.trust_remote_code",
}
"""Arguments of SGLang that are options of this plugin, with the name of the option."""

FIXED_ARGUMENTS = frozenset(
    {
        "allow_auto_truncate",
        "custom_sigquit_handler",
        "dist_init_addr",
        "grammar_backend",
        "incremental_streaming_output",
        "nnodes",
        "node_rank",
        "sampling_mask_max_tokens",
        "skip_tokenizer_init",
        "stream_output",
        "tokenizer_worker_num",
        "weight_version",
    }
)
"""Arguments of SGLang that the engine depends on, so that only the plugin sets them."""


@frozen(kw_only=True)
class SglangConfig:
    """
    Options for a model that SGLang runs.

    Attributes:
        model: model directory, instead of the run's `model.path`; its remote code is never trusted.
        dtype: of weights and KV cache; `auto` is float32 on a CPU and the checkpoint's dtype on a GPU.
        device: `cpu` or `cuda`; `auto` is a GPU if there is one.
        max_context: most tokens of context and output together; a smaller limit of the model wins.
        tensor_parallel_size: devices that share each layer.
        pipeline_parallel_size: groups of devices that share the layers.
        data_parallel_size: copies of the model behind this engine; weights can be updated with one copy only.
        max_running_requests: most requests in one step; None is 64 on a CPU and SGLang's choice on a GPU.
        mem_fraction_static: fraction of a GPU's memory for weights and KV cache; None leaves it to SGLang.
        max_total_tokens: tokens of the KV cache; None is eight contexts on a CPU, and on a GPU what fits its memory.
        prefix_caching: keep keys and values of finished requests for contexts with the same prefix.
        sleep_mode: support sleep; needs a GPU and torch_memory_saver, which SGLang installs for GPUs.
        weights_cpu_backup: sleep is level 1 and keeps the weights in host memory; false is level 2, which frees them.
        stop_strings: load the model's tokenizer, which stop strings need.
        grammars: turns may have a grammar, see `turnwise.sampling.Grammar`; needs the package llguidance and a
            tokenizer.json.
        enable_return_routed_experts: return the experts that a mixture of experts chose for each token, as the column
            `routed_experts`. It needs the plugin turnwise-router-replay.
        seed: for sampling; None draws one. Give replicas different seeds, or they sample the same.
        num_threads: OpenMP threads of each SGLang process; None leaves it to torch.
        weight_bucket_bytes: most bytes of weights that SGLang receives at once; a larger weight comes alone.
        start_timeout_s: seconds that SGLang may take to start.
        log_level: of SGLang's own log, whose end is shown if SGLang dies.
        engine_args: other arguments of SGLang's `ServerArgs`.
    """

    model: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_context: int = field(default=8192, validator=validators.ge(2))
    tensor_parallel_size: int = field(default=1, validator=_at_least_one)
    pipeline_parallel_size: int = field(default=1, validator=_at_least_one)
    data_parallel_size: int = field(default=1, validator=_at_least_one)
    max_running_requests: int | None = field(default=None, validator=_optional_at_least_one)
    mem_fraction_static: float | None = field(
        default=None, validator=validators.optional([validators.gt(0), validators.lt(1)])
    )
    max_total_tokens: int | None = field(default=None, validator=_optional_at_least_one)
    prefix_caching: bool = True
    sleep_mode: bool = True
    weights_cpu_backup: bool = True
    stop_strings: bool = False
    grammars: bool = False
    enable_return_routed_experts: bool = False
    seed: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    num_threads: int | None = field(default=None, validator=_optional_at_least_one)
    weight_bucket_bytes: int = field(default=512 << 20, validator=_at_least_one)
    start_timeout_s: float = field(default=900.0, validator=validators.gt(0))
    log_level: Literal["debug", "info", "warning", "error"] = "error"
    engine_args: Mapping[str, Any] = field(
        factory=dict, validator=engine_args_validator(OWNED_ARGUMENTS, FIXED_ARGUMENTS)
    )

    @property
    def world_size(self) -> int:
        """Number of devices that the engine needs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
