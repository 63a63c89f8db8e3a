"""Options of the SGLang engine. Nothing is loaded or looked up here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import Attribute, field, frozen, validators

_at_least_one = validators.ge(1)
_optional_at_least_one = validators.optional(_at_least_one)

OWNED_ARGUMENTS = {
    "context_length": "max_context",
    "device": "device",
    "disable_radix_cache": "prefix_caching",
    "dp_size": "data_parallel_size",
    "dtype": "dtype",
    "enable_memory_saver": "sleep_mode",
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
"""Arguments of SGLang that are options here, with the option's name."""

FIXED_ARGUMENTS = frozenset(
    {
        "allow_auto_truncate",
        "custom_sigquit_handler",
        "sampling_mask_max_tokens",
        "skip_tokenizer_init",
        "stream_output",
        "tokenizer_worker_num",
        "weight_version",
    }
)
"""Arguments of SGLang without which the engine would not be what it says it is."""


def _check_engine_args(_config: object, _attribute: Attribute[Any], engine_args: Mapping[str, Any]) -> None:
    for name in engine_args:
        if name in OWNED_ARGUMENTS:
            raise ValueError(f"'engine_args' must not hold {name!r}: set {OWNED_ARGUMENTS[name]}")
        if name in FIXED_ARGUMENTS:
            raise ValueError(f"'engine_args' must not hold {name!r}: the engine sets it")


@frozen(kw_only=True)
class SglangConfig:
    """
    How SGLang runs a model.

    Attributes:
        model: directory of the model, in place of the run's own; its remote code is never trusted.
        dtype: of weights and cache; `auto` is float32 on a CPU and the checkpoint's own elsewhere.
        device: `cpu` or `cuda`; `auto` is a GPU when there is one.
        max_context: most tokens of context and output together; the model's own limit when that is smaller.
        tensor_parallel_size: devices that share each layer.
        pipeline_parallel_size: groups of devices that share the layers among them.
        data_parallel_size: copies of the model behind this one engine; weights can be updated with one copy only.
        max_running_requests: requests that sample in one step; None is 64 on a CPU and SGLang's choice elsewhere.
        mem_fraction_static: share of a GPU's memory for weights and KV cache; None leaves it to SGLang.
        max_total_tokens: tokens of the KV cache; None is eight contexts on a CPU, and what the memory holds on a GPU.
        prefix_caching: keep keys and values of finished requests for contexts that begin alike.
        sleep_mode: make sleep possible; it needs a GPU and torch_memory_saver, which SGLang brings there.
        weights_cpu_backup: sleep is level 1 and keeps the weights in host memory; without it, level 2 drops them.
        stop_strings: load the model's tokenizer into SGLang so that requests may have stop strings.
        seed: of what requests draw; None draws one. Replicas need different seeds, or they sample alike.
        num_threads: threads of OpenMP in each of SGLang's processes; None leaves it to torch.
        weight_bucket_bytes: most bytes of weights that are handed to SGLang at once, unless one weight is larger.
        start_timeout_s: seconds for SGLang to start.
        log_level: of SGLang's own log, which is shown when it dies.
        engine_args: any other argument of SGLang's `ServerArgs`.
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
    seed: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    num_threads: int | None = field(default=None, validator=_optional_at_least_one)
    weight_bucket_bytes: int = field(default=512 << 20, validator=_at_least_one)
    start_timeout_s: float = field(default=900.0, validator=validators.gt(0))
    log_level: Literal["debug", "info", "warning", "error"] = "error"
    engine_args: Mapping[str, Any] = field(factory=dict, validator=_check_engine_args)

    @property
    def world_size(self) -> int:
        """Devices that this engine takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
