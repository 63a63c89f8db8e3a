"""
Decodes records with parallel paths, many at once, under the layout that they are trained under.

All paths of a block go on together, over one copy of what they share. When they are joined, their keys and values are
reused as they were computed, each path blind to its siblings; only tokens that were never fed are read: the last one of
each path and the join. So the distribution sampled from is that of a forward pass over the finished record under its
layout. The manager's batches cannot do this: their positions are those of plain text.

Everything here runs on the event loop but the forward passes, which run one after the other on a thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch  # noqa: TID253 - loaded by an engine that has loaded torch
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.layout import Layout
from turnwise.types import GenerateRequest
from turnwise_transformers_engine.context_tree import ContextTree
from turnwise_transformers_engine.layout_rows import Row, decoding_input, reading_input
from turnwise_transformers_engine.row_sampling import sample
from turnwise_transformers_engine.slot_cache import ForwardInput, PoolModel

_MAX_MASK_ENTRIES = 1 << 25
_WASTE = 2
"""A pass over rows of different lengths may be this much larger than what it reads."""


@define(eq=False)
class _Pass:
    """A forward pass, and the rows that get a token of it; None for rows that are still read."""

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
        seed: of requests that have none; None draws one.
        num_passes: forward passes so far.
        num_read: tokens that went through the model so far.
    """

    model: Any
    capacity: int
    max_batch_tokens: int = 1024
    seed: int | None = None
    num_passes: int = field(default=0, init=False)
    num_read: int = field(default=0, init=False)
    _pool: PoolModel = field(init=False)
    _tree: ContextTree = field(init=False)
    _rows: dict[str, Row] = field(factory=dict, init=False)
    _waiting: deque[Row] = field(factory=deque, init=False)
    _reading: deque[Row] = field(factory=deque, init=False)
    _decoding: list[Row] = field(factory=list, init=False)
    _generator: Any = field(default=None, init=False)
    _thread: ThreadPoolExecutor = field(init=False)
    _idle: asyncio.Event = field(factory=asyncio.Event, init=False)
    _scheduled: bool = field(default=False, init=False)
    _pauses: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin empty."""
        self._pool, self._tree = PoolModel(self.model), ContextTree(self.capacity)
        self._thread = ThreadPoolExecutor(1, "layout-decoder")
        self._idle.set()

    # What the engine calls

    def submit(
        self, handle: str, request: GenerateRequest, max_tokens: int, on_end: Callable[[Exception | None], None]
    ) -> Row:
        """
        Begin a request; its tokens appear in the row's `progress`.

        Args:
            handle: for `cancel`.
            request: with a layout.
            max_tokens: most tokens to sample; context and output fit the capacity.
            on_end: called when the request has ended by itself, with an error or None.

        Raises:
            EngineError: the layout does not fit the context, or the request does not fit the cache.
        """
        layout, num_tokens = request.layout or Layout(), len(request.token_ids)
        if layout.num_tokens > num_tokens:
            raise EngineError(f"the layout ends at token {layout.num_tokens}, the context has {num_tokens}")
        if num_tokens + max_tokens > self.capacity:
            raise EngineError(f"{num_tokens} + {max_tokens} tokens do not fit a layout cache of {self.capacity}")
        generator = self._random(request.sampling.seed)
        row = Row(request.token_ids.tolist(), layout, request.sampling, max_tokens, generator, on_end)
        self._rows[handle] = row
        self._waiting.append(row)
        self._wake()
        return row

    def cancel(self, handle: str) -> None:
        """Forget a request; unknown handles are ignored."""
        row = self._rows.pop(handle, None)
        if row is not None:
            row.ended = True
            self._wake()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Run no forward pass meanwhile; the one that runs ends first."""
        self._pauses += 1
        try:
            await self._idle.wait()
            yield
        finally:
            self._pauses -= 1
            self._wake()

    def forget(self, *, free: bool = False) -> None:
        """Drop all keys and values, while paused; requests that run are read again. `free` gives the memory back."""
        for row in (*self._decoding, *self._reading):
            row.displace()
        self._waiting.extendleft(reversed([*self._decoding, *self._reading]))
        self._decoding.clear()
        self._reading.clear()
        self._tree.clear()
        if free:
            self._pool.free()

    async def stop(self) -> None:
        """End the thread and free the memory; requests that run are forgotten."""
        self._pauses += 1
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        self.forget(free=True)
        self._waiting.clear()

    # Inside

    def _random(self, seed: int | None) -> torch.Generator:
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

    def _wake(self) -> None:
        # Soon, and not at once: requests that are sent together then run together from their first token on.
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._scheduled = False
        if self._pauses or not self._idle.is_set():
            return
        forward = self._next_pass()
        if forward is None:
            return
        self._idle.clear()
        run = asyncio.get_running_loop().run_in_executor(self._thread, self._run, forward, self._tree.num_slots)
        run.add_done_callback(lambda done: self._ran(forward, done))

    def _next_pass(self) -> _Pass | None:
        self._drop_ended()
        self._admit()
        if self._reading:
            return self._reading_pass()
        if self._decoding:
            return _Pass(decoding_input([row.feed(self._tree) for row in self._decoding]), list(self._decoding))
        return None

    def _drop_ended(self) -> None:
        # A row that is being read stays until it has been: others may have found its slots and count on them.
        for row in self._decoding:
            if row.ended:
                row.leave(self._tree)
        self._decoding = [row for row in self._decoding if not row.ended]
        self._waiting = deque(row for row in self._waiting if not row.ended)

    def _admit(self) -> None:
        running = [*self._reading, *self._decoding]
        reserved = sum(row.num_left for row in running)
        while self._waiting and len(running) < self.max_batch_tokens:
            row = self._waiting[0]
            needed = self._tree.num_needed(row.token_ids, row.layout) + row.num_left
            if self._tree.num_pinned + reserved + needed > self.capacity:
                return
            self._waiting.popleft()
            row.place(self._tree)
            reserved += row.num_left
            running.append(row)
            self._reading.append(row)

    def _reading_pass(self) -> _Pass:
        """Read the next rows, in the order in which they came: a row may count on what those before it have read."""
        rows: list[Row | None] = []
        pieces: list[Any] = []
        tokens, width, length = 0, 0, 0
        while self._reading:
            row = self._reading[0]
            room = min(self.max_batch_tokens, max(1, _MAX_MASK_ENTRIES // len(row.token_ids)))
            size = min(row.num_unread, room)
            wide, long = max(width, size), max(length, len(row.token_ids))
            area = (len(rows) + 1) * wide
            wasteful = area > _WASTE * (tokens + size) or area > self.max_batch_tokens
            if rows and (size < row.num_unread or wasteful or area * long > _MAX_MASK_ENTRIES):
                break
            pieces.append(row.reading(row.read(size)))
            tokens, width, length = tokens + size, wide, long
            if row.num_unread:
                rows.append(None)
                break
            rows.append(row)
            self._reading.popleft()
        return _Pass(reading_input(pieces), rows)

    def _run(self, forward: _Pass, num_slots: int) -> tuple[list[int], list[float]]:
        logits = self._pool.forward(forward.batch, num_slots)
        due = [index for index, row in enumerate(forward.rows) if row is not None]
        if not due:
            return [], []
        rows = [row for row in forward.rows if row is not None]
        return sample(logits[due], [row.sampling for row in rows], [row.generator for row in rows])

    def _ran(self, forward: _Pass, done: asyncio.Future[tuple[list[int], list[float]]]) -> None:
        self._idle.set()
        self.num_passes += 1
        self.num_read += int(forward.batch.token_ids.size)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._fail(error)
        elif not done.cancelled():
            rows = [row for row in forward.rows if row is not None]
            for row, token, logprob in zip(rows, *done.result(), strict=True):
                self._take(row, token, logprob)
        if not self._pauses:
            self._wake()

    def _take(self, row: Row, token: int, logprob: float) -> None:
        if not row.ended:
            row.take(token, logprob)
        over = row.ended or row.progress.finished
        if over:
            row.leave(self._tree)
        if row in self._decoding:
            if over:
                self._decoding.remove(row)
        elif not over:
            self._decoding.append(row)
        if row.progress.finished and not row.ended:
            row.ended = True
            row.on_end(None)

    def _fail(self, error: BaseException) -> None:
        """End all that run: what a pass that failed has written is not known."""
        rows = [row for row in (*self._decoding, *self._reading, *self._rows.values()) if not row.ended]
        self.forget()
        for row in dict.fromkeys(rows):
            row.ended = True
            row.on_end(EngineError(f"decoding under a layout failed: {type(error).__name__}: {error}"))
