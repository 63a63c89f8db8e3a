"""Options of the embedded engine. Nothing is loaded or looked up here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import field, frozen, validators

_at_least_one = validators.ge(1)
_optional_at_least_one = validators.optional(_at_least_one)


@frozen(kw_only=True)
class TransformersConfig:
    """
    How the embedded engine runs a model.

    Attributes:
        model: directory of the model, in place of the run's own; its remote code is never trusted.
        dtype: of weights and cache; `auto` is float32 on a CPU and the checkpoint's own elsewhere.
        device: any device of torch; `auto` is a GPU when there is one.
        attn_implementation: `sdpa` and `eager` need nothing; the others need a flash attention package and a GPU.
        max_context: most tokens of context and output together; the model's own limit when that is smaller.
        page_size: tokens of one page of the cache, the grain of prefix caching; None is 16, or 256 with flash
            attention, whose kernels ask for it.
        num_blocks: pages of the cache; None is room for two full contexts on a CPU and what `memory_fraction` allows
            on a GPU.
        max_batch_tokens: most tokens of one forward pass; longer prompts are read in pieces.
        memory_fraction: share of the device's free memory that cache and batch may take.
        layout_cache_tokens: tokens of the cache for records with parallel paths, which grows as it is used; None is
            room for eight full contexts.
        prefix_caching: keep full pages of finished requests for contexts that begin alike. Of requests for one context
            at once, as for a GRPO group, the first reads it and the others wait for its pages.
        sleep: offer sleep levels. On a GPU that costs CUDA graphs, whose addresses would be stale after waking up.
        num_threads: threads of torch, in the whole process; None leaves them alone.
        seed: of torch's random numbers, in the whole process; None draws one. With a seed the same requests, sent in
            the same order and batched alike, give the same ids; replicas need different seeds.
    """

    model: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    max_context: int = field(default=8192, validator=validators.ge(2))
    # Pages of fewer than 4 tokens are refused by transformers.
    page_size: int | None = field(default=None, validator=validators.optional(validators.ge(4)))
    num_blocks: int | None = field(default=None, validator=_optional_at_least_one)
    max_batch_tokens: int = field(default=1024, validator=_at_least_one)
    memory_fraction: float = field(default=0.8, validator=[validators.gt(0), validators.le(1)])
    layout_cache_tokens: int | None = field(default=None, validator=_optional_at_least_one)
    prefix_caching: bool = True
    sleep: bool = True
    num_threads: int | None = field(default=None, validator=_optional_at_least_one)
    seed: int | None = field(default=None, validator=validators.optional(validators.ge(0)))

    @property
    def tokens_per_page(self) -> int:
        """The page size in force."""
        if self.page_size is not None:
            return self.page_size
        return 256 if self.attn_implementation.startswith("flash") else 16

    @property
    def num_cache_tokens(self) -> int | None:
        """Tokens that the cache holds, when that is set."""
        return None if self.num_blocks is None else self.num_blocks * self.tokens_per_page
