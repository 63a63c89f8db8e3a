"""
Decodes plain requests with the fused forward pass: one thread, one step for all rows, one message per step.

New requests are prefilled first, so that requests that are sent together decode together. Requests end between two
steps. The event loop hears of a request once, when it ends.
"""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from attrs import define, field

from turnwise_engine_support.error_lines import error_line
from turnwise_transformers_engine.fused.batch_sampling import make_columns, sample_rows
from turnwise_transformers_engine.fused.model import Chunk, FusedModel
from turnwise_transformers_engine.fused.prefix_pages import PageKey, PrefixPages
from turnwise_transformers_engine.fused.row_batch import (
    FusedRow,
    RowBatch,
    RowGroup,
    apply_grammars,
    join,
    sampling_columns,
)
from turnwise_transformers_engine.fused.slab import Slab
from turnwise_transformers_engine.weights.served_weights import ServedWeights

Notify = Callable[[list[FusedRow]], None]
"""Reports rows that have ended, from the decoder's thread."""


@define(eq=False)
class FusedDecoder:
    """
    The decoder. `submit`, `cancel` and `paused` may be called from any thread.

    Attributes:
        model: the forward pass.
        served: the weights that it reads.
        num_pages: pages of the cache; running rows and cached prefixes share them.
        page_size: tokens of a page.
        max_batch_tokens: most tokens of a prefill, and most rows.
        prefix_caching: keep whole pages for later contexts.
        num_steps: forward passes so far.
        failure: error that ended the thread; empty while it runs.
    """

    model: FusedModel
    served: ServedWeights
    num_pages: int
    page_size: int
    max_batch_tokens: int
    prefix_caching: bool
    num_steps: int = field(default=0, init=False)
    failure: str = field(default="", init=False)
    _notify: Notify = field(init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _pauses: int = field(default=0, init=False)
    _parked: bool = field(default=False, init=False)
    _stopping: bool = field(default=False, init=False)
    _incoming: deque[FusedRow] = field(factory=deque, init=False)
    _waiting: deque[FusedRow] = field(factory=deque, init=False)
    _prefilling: dict[FusedRow, PageKey | None] = field(factory=dict, init=False)
    _batch: RowBatch = field(init=False)
    _pages: PrefixPages | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.allocate()

    def start(self, notify: Notify) -> None:
        """Start the thread."""
        self._notify = notify
        # An engine that is never stopped must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="fused-decoder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after its step."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive() and not self.failure

    def submit(self, row: FusedRow) -> None:
        """Start a request."""
        with self._changed:
            self._incoming.append(row)
            self._changed.notify_all()

    def cancel(self, row: FusedRow) -> None:
        """End a request before the next step."""
        with self._changed:
            row.ended = True
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the running step, and start none during the block; `RuntimeError` if the thread has ended."""
        with self._changed:
            self._pauses += 1
            self._changed.notify_all()
            while not self._parked and self.is_alive:
                self._changed.wait(0.1)
        try:
            if not self.is_alive:
                raise RuntimeError(self.failure or "the decoder has been stopped")
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    @property
    def has_rows(self) -> bool:
        """Whether any request has not left yet; read it while paused."""
        rows = (*self._incoming, *self._waiting, *self._batch.rows)
        return any(not row.ended for row in rows)

    def forget(self) -> None:
        """Drop all keys and values, while paused; running requests are prefilled again."""
        # Waiting requests came later than all running ones.
        self._waiting.extendleft(reversed(self._batch.clear()))
        self._prefilling.clear()
        if self._pages is not None:
            self._pages.clear()

    def free(self) -> None:
        """Free the cache, while paused and without running requests."""
        self.forget()
        self._batch = RowBatch(self._make_slab, self.model.max_context)
        self._pages = None

    def allocate(self) -> None:
        """Make an empty cache."""
        model = self.model
        self._batch = RowBatch(self._make_slab, model.max_context)
        if self.prefix_caching:
            shape = (model.num_layers, 2, self.num_pages, self.page_size, model.num_groups, model.depth)
            # Memory that is never written to is never resident on a CPU.
            self._pages = PrefixPages(self.page_size, torch.empty(shape, device=model.model.device))

    def _make_slab(self, length: int) -> Slab:
        model = self.model
        return Slab.make(length, model.num_layers, model.num_groups, model.depth, model.model.device)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step()
        except BaseException as error:  # noqa: BLE001 - any end of the thread fails the requests that wait for it
            self.failure = error_line(error)
            self._notify([])
        finally:
            with self._changed:
                self._parked = True
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait until there is a step to run, and return false when the thread has to end."""
        with self._changed:
            while True:
                if self._stopping:
                    return False
                if not self._pauses and not self.served.torn:
                    self._waiting.extend(self._incoming)
                    self._incoming.clear()
                    self._drop_ended()
                    if self._waiting or len(self._batch):
                        return True
                self._parked = True
                self._changed.notify_all()
                self._changed.wait()
                self._parked = False

    def _drop_ended(self) -> None:
        for row in self._batch.rows:
            if row.ended:
                self._leave(row)
        if any(row.ended for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if not row.ended)

    def _step(self) -> None:
        self._admit()
        finished = self._prefill() if self._prefilling else self._decode()
        for row in finished:
            row.ended = True
            self._leave(row)
        if finished:
            self._notify(finished)

    def _admit(self) -> None:
        """Place waiting rows in order of arrival while the cache has space."""
        num_used, deferred = self._batch.num_pages(self.page_size), []
        keys = {key for key in self._prefilling.values() if key is not None}
        num_tokens = sum(row.num_tokens - row.num_prefilled for row in self._prefilling)
        while self._waiting and num_tokens < self.max_batch_tokens > len(self._batch):
            row = self._waiting[0]
            needed = row.num_tokens // self.page_size + 1
            if len(self._batch) and num_used + needed > self.num_pages:
                break
            self._waiting.popleft()
            pages, key = self._pages.find(row.token_ids) if self._pages is not None else ([], None)
            if key in keys:
                # Another row computes the page that this row needs next: after this pass it can be copied.
                deferred.append(row)
                continue
            self._place(row, pages)
            self._prefilling[row] = key
            num_tokens += row.num_tokens - row.num_prefilled
            num_used += needed
            if key is not None:
                keys.add(key)
        self._waiting.extendleft(reversed(deferred))

    def _place(self, row: FusedRow, pages: list[int]) -> None:
        self._batch.group_for(row.num_tokens + 1).add(row)
        row.num_prefilled = self._pages.load(pages, row.data) if self._pages is not None else 0
        if row.num_cached < 0:
            row.num_cached = row.num_prefilled

    def _prefill(self) -> list[FusedRow]:
        """Run the next tokens of rows that are prefilled, and return the rows that have finished."""
        chunks, rows, space = [], [], self.max_batch_tokens
        for row in self._prefilling:
            group, start = row.group, row.num_prefilled
            assert group is not None
            token_ids = row.token_ids[start : start + space]
            chunks.append(Chunk(group.slab, row.index, start, token_ids))
            rows.append(row)
            row.num_prefilled += len(token_ids)
            space -= len(token_ids)
            if space <= 0:
                break
        logits = self.model.prefill(chunks)
        self.num_steps += 1
        done = [index for index, row in enumerate(rows) if row.num_prefilled == row.num_tokens]
        if not done:
            return []
        rows = [rows[index] for index in done]
        for row in rows:
            del self._prefilling[row]
            self._keep_pages(row, row.token_ids)
        counts = [len(row.progress.generated_tokens) for row in rows]
        columns = make_columns([row.values for row in rows], counts)
        logits = logits[done] if len(done) < len(chunks) else logits
        apply_grammars(logits, rows)
        tokens, logprobs = sample_rows(logits, columns)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            # An update drops all keys and values, so each row passes here before its first token of a version.
            row.progress.start_version(self.served.version)
            row.add_token(token, logprob)
            assert row.group is not None
            row.group.start_decoding(row, token)
        return [row for row in rows if row.progress.finished]

    def _decode(self) -> list[FusedRow]:
        """Run one token of every row, and return the rows that have finished."""
        groups = self._groups_with_space()
        if not groups:
            return []
        sizes = [len(group) for group in groups]
        slabs = [
            (group.slab, size, int(group.position[:size].max()) + 1) for group, size in zip(groups, sizes, strict=True)
        ]
        device = self.model.model.device
        ids = torch.from_numpy(join([group.next_token[: len(group)] for group in groups])).to(device)
        positions = torch.from_numpy(join([group.position[: len(group)] for group in groups])).to(device)
        logits = self.model.decode(ids, positions, slabs)
        self.num_steps += 1
        rows = [row for group in groups for row in group.rows]
        apply_grammars(logits, rows)
        tokens, logprobs = sample_rows(logits, sampling_columns(groups))
        sampled = np.array(tokens, np.int64)
        for group, own in zip(groups, np.split(sampled, np.cumsum(sizes)[:-1]), strict=True):
            size = len(group)
            group.next_token[:size] = own
            group.position[:size] += 1
            group.count[:size] += 1
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.add_token(token, logprob)
        return [row for row in rows if row.progress.finished]

    def _groups_with_space(self) -> list[RowGroup]:
        """Return the groups to decode, after rows that the cache has no space for were put back into the queue."""
        num_used = self._batch.num_pages(self.page_size)
        while num_used > self.num_pages and len(self._batch) > 1:
            # The shortest row is the cheapest to prefill again.
            row = min(self._batch.rows, key=lambda each: each.num_tokens)
            num_used -= (row.num_tokens - 1) // self.page_size + 1
            self._displace(row)
            self._waiting.appendleft(row)
        if self._pages is not None:
            self._pages.limit(self.num_pages - num_used)
        return self._batch.groups()

    def _leave(self, row: FusedRow) -> None:
        """Keep the pages of a row, and take its place."""
        if row not in self._prefilling:
            # The last token was sampled, but has not run.
            self._keep_pages(row, row.token_ids[:-1])
        self._displace(row)

    def _keep_pages(self, row: FusedRow, token_ids: list[int]) -> None:
        if self._pages is not None:
            space = self.num_pages - self._batch.num_pages(self.page_size)
            self._pages.store(token_ids, row.data, space)

    def _displace(self, row: FusedRow) -> None:
        self._prefilling.pop(row, None)
        row.num_prefilled = 0
        if row.group is not None:
            row.group.remove(row)
