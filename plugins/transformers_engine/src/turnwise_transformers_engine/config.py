"""Options of the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen, validators

from turnwise_engine_support.devices import MOST_THREADS

_at_least_one = validators.ge(1)
_optional_at_least_one = validators.optional(_at_least_one)
_thread_count = validators.optional(validators.and_(_at_least_one, validators.le(MOST_THREADS)))


@frozen(kw_only=True)
class TransformersConfig:
    """
    Options for a model that the embedded engine runs.

    Attributes:
        model: model directory, instead of the run's `model.path`; its remote code is never trusted.
        dtype: of weights and KV cache; `auto` is float32 on a CPU and the checkpoint's dtype on a GPU.
        device: any torch device; `auto` is a GPU if there is one.
        attn_implementation: `sdpa` and `eager` always work; the others need a flash attention package and a GPU.
        max_context: most tokens of context and output together; a smaller limit of the model wins.
        page_size: tokens of a page of the KV cache, the unit of prefix caching; None is 16, or 256 with flash
            attention, whose kernels require it.
        num_blocks: pages of the KV cache; None is two full contexts on a CPU, and on a GPU what `memory_fraction`
            allows.
        max_batch_tokens: most tokens of a forward pass; longer prompts are prefilled in chunks.
        memory_fraction: fraction of the device's free memory for cache and batch.
        layout_cache_tokens: most tokens of the cache for records with parallel paths, which grows as it is used; None
            is eight full contexts.
        prefix_caching: keep full pages of finished requests for contexts with the same prefix. Of concurrent requests
            with one context, such as a GRPO group, the first prefills it and the others wait for its pages.
        sleep: support sleep. On a GPU this disables CUDA graphs, whose addresses would be stale after waking up.
        num_threads: torch threads of the whole process; None leaves them alone.
        seed: for sampling; None draws one. With a seed, the same requests in the same order give the same ids, apart
            from rounding; with the generic decoder they must also be batched in the same way. Give replicas different
            seeds.
        decoder: `fused` is a fast forward pass for float32 models of known architectures, `generic` is transformers'
            continuous batching; `auto` is fused on a CPU if the logits of both agree when the model is loaded.
        pack_weights: let the fused decoder keep a copy of each large weight in the order in which the processor's
            products read it. Decoding is faster, and the weights take twice the memory.
        product_dtype: of the matrix products of the fused decoder. `bfloat16` rounds their inputs, which is up to twice
            as fast where the processor has instructions for it, and keeps a copy of half the size. A token's
            log-probability belongs to the distribution that it was drawn from, and differs by about a hundredth from a
            trainer's in float32, which can correct the difference.
        enable_return_routed_experts: return the experts that a mixture of experts chose for each token, as the column
            `routed_experts`. It needs the plugin turnwise-router-replay.
    """

    model: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    max_context: int = field(default=8192, validator=validators.ge(2))
    # transformers refuses pages of fewer than 4 tokens.
    page_size: int | None = field(default=None, validator=validators.optional(validators.ge(4)))
    num_blocks: int | None = field(default=None, validator=_optional_at_least_one)
    max_batch_tokens: int = field(default=1024, validator=_at_least_one)
    memory_fraction: float = field(default=0.8, validator=[validators.gt(0), validators.le(1)])
    layout_cache_tokens: int | None = field(default=None, validator=_optional_at_least_one)
    prefix_caching: bool = True
    sleep: bool = True
    num_threads: int | None = field(default=None, validator=_thread_count)
    seed: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    decoder: Literal["auto", "fused", "generic"] = "auto"
    pack_weights: bool = True
    product_dtype: Literal["float32", "bfloat16"] = "float32"
    enable_return_routed_experts: bool = False

    @property
    def tokens_per_page(self) -> int:
        """The page size, with its default."""
        if self.page_size is not None:
            return self.page_size
        return 256 if self.attn_implementation.startswith("flash") else 16

    @property
    def num_cache_tokens(self) -> int | None:
        """Tokens of the KV cache if `num_blocks` is set."""
        return None if self.num_blocks is None else self.num_blocks * self.tokens_per_page
