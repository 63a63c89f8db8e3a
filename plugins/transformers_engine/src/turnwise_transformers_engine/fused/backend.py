"""The fused decoder as a backend of the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError, ReplicaDiedError
from turnwise.types import GenerateRequest
from turnwise_transformers_engine.requests import Pending
from turnwise_transformers_engine.weights.served_weights import ServedWeights

if TYPE_CHECKING:
    from turnwise_transformers_engine.fused.decoder import FusedDecoder
    from turnwise_transformers_engine.fused.row_batch import FusedRow


@define(eq=False)
class FusedBackend:
    """
    See `Backend`.

    Attributes:
        decoder: decodes the requests.
        seed: for requests without a seed; None draws one.
    """

    decoder: FusedDecoder
    seed: int | None
    _seeds: np.random.Generator = field(init=False)
    _rows: dict[Pending, FusedRow] = field(factory=dict, init=False)
    _call_soon: Callable[..., object] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._seeds = np.random.default_rng(self.seed)

    @property
    def model(self) -> Any:
        return self.decoder.model.model

    @property
    def routes(self) -> None:
        """None: no architecture that can be fused has experts."""

    def serves(self, request: GenerateRequest) -> bool:
        return request.layout is None

    def start(self, call_soon: Callable[..., object]) -> None:
        self._call_soon = call_soon
        self.decoder.start(self._report)

    def stop(self) -> None:
        self.decoder.stop()

    def death(self) -> ReplicaDiedError | None:
        if self.decoder.is_alive:
            return None
        return ReplicaDiedError(f"the transformers engine's thread died: {self.decoder.failure or 'it left no error'}")

    async def wait_for_prefix(self, pending: Pending) -> None:
        """Return at once: the decoder lets requests with one context wait for the first."""

    def submit(self, pending: Pending, max_tokens: int) -> None:
        from turnwise_transformers_engine.fused.batch_sampling import sampling_values
        from turnwise_transformers_engine.fused.row_batch import FusedRow

        sampling = pending.request.sampling
        seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(2**63))

        def on_end(error: Exception | None) -> None:
            if error is None:
                pending.end(aborted=False)
            else:
                pending.fail(error)

        row = FusedRow(
            context=pending.request.token_ids.tolist(),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            max_tokens=max_tokens,
            values=sampling_values(sampling, seed, self.model.config.vocab_size),
            on_end=on_end,
            grammar=pending.grammar,
        )
        pending.output, pending.spans = row.progress, row.progress.spans
        self._rows[pending] = row
        self.decoder.submit(row)

    def cancel(self, pending: Pending) -> None:
        row = self._rows.pop(pending, None)
        if row is not None:
            pending.num_cached_tokens = max(row.num_cached, 0)
            self.decoder.cancel(row)

    def paused(self) -> AbstractContextManager[None]:
        return self.decoder.paused()

    def has_requests(self) -> bool:
        return self.decoder.has_rows

    def drop_keys_values(self) -> None:
        self.decoder.model.refresh()
        self.decoder.forget()

    def free_cache(self) -> None:
        self.decoder.free()
        self.decoder.model.refresh()  # the update after a sleep would drop the packed copies anyway

    def restore_cache(self) -> None:
        self.decoder.allocate()

    def release_weights(self) -> None:
        self.decoder.model.release()

    def bind_weights(self) -> None:
        self.decoder.model.bind()

    def _report(self, rows: list[FusedRow]) -> None:
        """Tell the event loop about rows that have ended; all rows if the thread has died."""
        try:
            self._call_soon(partial(self._end, rows))
        except RuntimeError:
            # The loop was closed without stopping the engine; nothing waits any more.
            return

    def _end(self, rows: list[FusedRow]) -> None:
        if self.decoder.failure:
            for row in list(self._rows.values()):
                row.on_end(self.death())
        for row in rows:
            row.on_end(row.error)


def make_fused_backend(
    model: Any, served: ServedWeights, max_context: int, num_pages: int, config: Any
) -> tuple[FusedBackend | None, str]:
    """
    Return the backend, and a text for the log: the reason if there is none, or what it lacks.

    Raises:
        EngineError: the memory is too small for the cache.
    """
    import torch

    from turnwise_transformers_engine.fused.decoder import FusedDecoder
    from turnwise_transformers_engine.fused.probe import fuse

    product_dtype = getattr(torch, config.product_dtype)
    fused, text = fuse(model, max_context, packs=config.pack_weights, product_dtype=product_dtype)
    if fused is None:
        return None, text
    _check_memory(fused, num_pages * config.tokens_per_page, config.memory_fraction)
    decoder = FusedDecoder(
        fused, served, num_pages, config.tokens_per_page, config.max_batch_tokens, config.prefix_caching
    )
    return FusedBackend(decoder, config.seed), text


def _check_memory(fused: Any, num_tokens: int, fraction: float) -> None:
    import psutil

    needed = 2 * fused.num_layers * num_tokens * fused.num_groups * fused.depth * 4
    allowed = int(fraction * psutil.virtual_memory().available)
    if needed > allowed:
        raise EngineError(
            f"cannot make the cache: MemoryError: {num_tokens} tokens need {needed >> 20} MiB, and memory_fraction"
            f" allows {allowed >> 20} MiB"
        )
