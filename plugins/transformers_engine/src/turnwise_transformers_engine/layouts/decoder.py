"""
Decodes records with parallel paths, many at once, under the layout that they are trained with.

All paths of a block decode together, over one copy of their shared context. A join reuses the keys and values that the
paths computed, where no path attends to its siblings. Only tokens that never ran are prefilled: the last one of each
path, and the join. So tokens are sampled from the distribution of a forward pass over the finished record under its
layout. The manager's batches cannot do this, because their positions are consecutive.

Everything runs on the event loop except the forward passes, which run one after the other on a thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch  # noqa: TID253 - imported after the engine has loaded torch
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.layout import Layout
from turnwise.types import GenerateRequest
from turnwise_engine_support.error_lines import error_line
from turnwise_engine_support.grammars import TurnGrammar
from turnwise_transformers_engine.layouts.context_tree import ContextTree
from turnwise_transformers_engine.layouts.row_pictures import RowPictures
from turnwise_transformers_engine.layouts.row_sampling import sample
from turnwise_transformers_engine.layouts.rows import Row, decode_input, prefill_input
from turnwise_transformers_engine.layouts.slot_cache import ForwardInput, PoolModel, RowSources
from turnwise_transformers_engine.masks import exclude_ids
from turnwise_transformers_engine.routes import RouteStore
from turnwise_transformers_engine.weights.served_weights import ServedWeights

_MAX_MASK_ENTRIES = 1 << 25
_MAX_PADDING_FACTOR = 2
"""Largest size of a pass over rows of different lengths, relative to its tokens without padding."""


@define(eq=False)
class _Pass:
    """A forward pass, and the rows that sample a token from it; None for rows that are still prefilled."""

    batch: ForwardInput
    rows: list[Row | None]


@define(eq=False)
class LayoutDecoder:
    """
    Continues contexts under layouts.

    Attributes:
        model: a causal language model of transformers, on its device.
        capacity: slots of the cache; every request must fit.
        max_batch_tokens: most tokens of a pass, and most rows.
        seed: for requests without a seed; None draws one.
        served: the weights that it reads.
        routes: of the tokens in its cache; None if they are not returned.
        alone: no other decoder runs the model.
        num_passes: forward passes so far.
        num_processed: tokens that the model has processed, padding included.
    """

    model: Any
    capacity: int
    max_batch_tokens: int = 1024
    seed: int | None = None
    served: ServedWeights = field(factory=ServedWeights, kw_only=True)
    routes: RouteStore | None = field(default=None, kw_only=True)
    alone: bool = field(default=False, kw_only=True)
    num_passes: int = field(default=0, init=False)
    num_processed: int = field(default=0, init=False)
    _pool: PoolModel = field(init=False)
    _tree: ContextTree = field(init=False)
    _rows: dict[str, Row] = field(factory=dict, init=False)
    _waiting: deque[Row] = field(factory=deque, init=False)
    _prefilling: deque[Row] = field(factory=deque, init=False)
    _decoding: list[Row] = field(factory=list, init=False)
    _generator: Any = field(default=None, init=False)
    _thread: ThreadPoolExecutor = field(init=False)
    _idle: asyncio.Event = field(factory=asyncio.Event, init=False)
    _scheduled: bool = field(default=False, init=False)
    _pauses: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._pool, self._tree = PoolModel(self.model, self.alone), ContextTree(self.capacity)
        self._thread = ThreadPoolExecutor(1, "layout-decoder")
        self._idle.set()

    def submit(
        self,
        handle: str,
        request: GenerateRequest,
        max_tokens: int,
        on_end: Callable[[Exception | None], None],
        grammar: TurnGrammar | None = None,
        pictures: RowPictures | None = None,
    ) -> Row:
        """
        Start a request. Its tokens appear in the row's `progress`.

        Args:
            handle: the argument of `cancel`.
            request: the request, with or without a layout.
            max_tokens: most tokens to sample.
            on_end: called when the request has finished, with None, or has failed, with an error.
            grammar: state of its grammar, if it has one.
            pictures: of its context, if it has some.

        Raises:
            EngineError: the layout does not fit the context, or the request does not fit the cache.
        """
        layout, num_tokens = request.layout or Layout(), len(request.token_ids)
        if layout.num_tokens > num_tokens:
            raise EngineError(f"the layout ends at token {layout.num_tokens}, but the context has {num_tokens}")
        if num_tokens + max_tokens > self.capacity:
            raise EngineError(f"the layout cache has {self.capacity} tokens, too few for {num_tokens} + {max_tokens}")
        generator = self._make_generator(request.sampling.seed)
        ids = request.token_ids.tolist()
        row = Row(ids, layout, request.sampling, max_tokens, generator, on_end, grammar, pictures)
        row.routes = None if self.routes is None else self.routes.make_request()
        self._rows[handle] = row
        self._waiting.append(row)
        self._schedule_pass()
        return row

    def cancel(self, handle: str) -> None:
        """Forget a request. Unknown handles are ignored."""
        row = self._rows.pop(handle, None)
        if row is not None:
            row.ended = True
            self._schedule_pass()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Wait for the running forward pass, and start none during the block."""
        self._pauses += 1
        try:
            await self._idle.wait()
            yield
        finally:
            self._pauses -= 1
            self._schedule_pass()

    def forget(self, *, free: bool = False) -> None:
        """Drop all keys and values, while paused, so that running requests prefill again. `free` frees the memory."""
        for row in (*self._decoding, *self._prefilling):
            row.displace()
        self._waiting.extendleft(reversed([*self._decoding, *self._prefilling]))
        self._decoding.clear()
        self._prefilling.clear()
        self._tree.clear()
        if free:
            self._pool.free()
            if self.routes is not None:
                self.routes.clear()

    async def stop(self) -> None:
        """End the thread, free the memory, and forget running requests."""
        self._pauses += 1
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        self.forget(free=True)
        self._waiting.clear()

    def _make_generator(self, seed: int | None) -> torch.Generator:
        if seed is not None:
            return torch.Generator(self.model.device).manual_seed(seed)
        if self._generator is None:
            self._generator = torch.Generator(self.model.device)
            if self.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.seed)
        generator: torch.Generator = self._generator
        return generator

    def _schedule_pass(self) -> None:
        # On the next turn of the loop, so that requests that are sent together run together from their first token.
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start_pass)

    def _start_pass(self) -> None:
        self._scheduled = False
        if self._pauses or self.served.torn or not self._idle.is_set():
            return
        forward = self._next_pass()
        if forward is None:
            return
        # Set again by `_finish_pass`, so at most one pass runs, and `paused` waits for it.
        self._idle.clear()
        run = asyncio.get_running_loop().run_in_executor(self._thread, self._run_pass, forward, self._tree.num_slots)
        run.add_done_callback(lambda done: self._finish_pass(forward, done))

    def _next_pass(self) -> _Pass | None:
        self._drop_ended()
        self._admit()
        if self._prefilling:
            return self._prefill_pass()
        if self._decoding:
            placed = [row.place_last_token(self._tree) for row in self._decoding]
            return _Pass(decode_input(placed), list(self._decoding))
        return None

    def _drop_ended(self) -> None:
        # A prefilling row stays until it is done: rows placed after it may share its slots and depend on its keys.
        for row in self._decoding:
            if row.ended:
                row.leave(self._tree)
        self._decoding = [row for row in self._decoding if not row.ended]
        self._waiting = deque(row for row in self._waiting if not row.ended)

    def _admit(self) -> None:
        running = [*self._prefilling, *self._decoding]
        reserved = sum(row.num_left for row in running)
        while self._waiting and len(running) < self.max_batch_tokens:
            row = self._waiting[0]
            needed = self._tree.num_needed(row.tree_ids, row.layout) + row.num_left
            if self._tree.num_pinned + reserved + needed > self.capacity:
                return
            self._waiting.popleft()
            row.place(self._tree)
            reserved += row.num_left
            running.append(row)
            self._prefilling.append(row)

    def _prefill_pass(self) -> _Pass:
        """Prefill the next rows in order of arrival: a row may depend on keys of those before it."""
        rows: list[Row | None] = []
        chunks: list[Any] = []
        pictures: list[RowSources | None] = []
        tokens, width, length = 0, 0, 0
        while self._prefilling:
            row = self._prefilling[0]
            limit = min(self.max_batch_tokens, max(1, _MAX_MASK_ENTRIES // len(row.token_ids)))
            size = min(row.num_unprefilled, limit)
            wide, long = max(width, size), max(length, len(row.token_ids))
            area = (len(rows) + 1) * wide
            wasteful = area > _MAX_PADDING_FACTOR * (tokens + size) or area > self.max_batch_tokens
            if rows and (size < row.num_unprefilled or wasteful or area * long > _MAX_MASK_ENTRIES):
                break
            queries = row.take_unprefilled(size)
            chunks.append(row.prefill_columns(queries))
            pictures.append(row.picture_sources(queries))
            tokens, width, length = tokens + size, wide, long
            if row.num_unprefilled:
                rows.append(None)
                break
            rows.append(row)
            self._prefilling.popleft()
        return _Pass(prefill_input(chunks, pictures), rows)

    def _run_pass(self, forward: _Pass, num_slots: int) -> tuple[list[int], list[float]]:
        if self.routes is None:
            logits = self._pool.forward(forward.batch, num_slots)
        else:
            with self.routes.recording() as found:
                logits = self._pool.forward(forward.batch, num_slots)
            self.routes.write(forward.batch.write.reshape(-1), found.routes())
        due = [index for index, row in enumerate(forward.rows) if row is not None]
        if not due:
            return [], []
        rows = [row for row in forward.rows if row is not None]
        logits = logits[due]
        states = {index: row.grammar for index, row in enumerate(rows) if row.grammar is not None}
        for index, error in exclude_ids(logits, states).items():
            rows[index].error = error
        return sample(logits, [row.sampling for row in rows], [row.generator for row in rows])

    def _finish_pass(self, forward: _Pass, done: asyncio.Future[tuple[list[int], list[float]]]) -> None:
        self._idle.set()
        self.num_passes += 1
        self.num_processed += int(forward.batch.token_ids.size)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._fail(error)
        elif not done.cancelled():
            rows = [row for row in forward.rows if row is not None]
            for row, token, logprob in zip(rows, *done.result(), strict=True):
                self._add_token(row, token, logprob)
        if not self._pauses:
            self._schedule_pass()

    def _add_token(self, row: Row, token: int, logprob: float) -> None:
        decodes = row in self._decoding
        if not decodes:
            row.drop_features()
        if not row.ended:
            if self.routes is not None:
                row.note_routes(self.routes)
            if not decodes:
                # An update drops all keys and values, so each row passes here before its first token of a version.
                row.progress.start_version(self.served.version)
            row.add_token(token, logprob)
        over = row.ended or row.progress.finished
        if over:
            row.leave(self._tree)
        if decodes and over:
            self._decoding.remove(row)
        elif not decodes and not over:
            self._decoding.append(row)
        if row.progress.finished and not row.ended:
            row.ended = True
            row.on_end(row.error)

    def _fail(self, error: BaseException) -> None:
        """Fail all running requests, because a failed pass leaves the cache in an unknown state."""
        rows = [row for row in (*self._decoding, *self._prefilling, *self._rows.values()) if not row.ended]
        self.forget()
        for row in dict.fromkeys(rows):
            row.ended = True
            row.on_end(EngineError(f"decoding under a layout failed: {error_line(error)}"))
