"""The requests of the layout decoder while they run, and the forward passes that they need next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from turnwise.layout import Layout, visible_keys
from turnwise.types import SamplingParams
from turnwise_transformers_engine.context_tree import TRASH, ContextTree, Placement
from turnwise_transformers_engine.slot_cache import ForwardInput, padded


@define(eq=False)
class Progress:
    """
    What has been sampled for a request; the names are those of the manager's outputs.

    Attributes:
        generated_tokens: ids so far.
        logprobs: of each.
        finished: whether no more will come.
    """

    generated_tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    finished: bool = False

    def is_finished(self) -> bool:
        """Return whether no more will come."""
        return self.finished


@define(eq=False)
class Row:
    """
    A request in the decoder.

    Attributes:
        token_ids: its context and what was sampled.
        layout: of the context; what is sampled sees all of it.
        sampling: how to draw.
        max_tokens: most tokens to sample.
        generator: random numbers.
        on_end: called once, with an error or None.
        progress: what was sampled.
        placement: where its tokens stand in the tree; None while it waits.
        num_cached: tokens of the context that were in the cache when it was first placed; -1 before.
        ended: nobody waits for it any more.
    """

    token_ids: list[int]
    layout: Layout
    sampling: SamplingParams
    max_tokens: int
    generator: Any
    on_end: Callable[[Exception | None], None]
    progress: Progress = field(factory=Progress)
    placement: Placement | None = None
    num_cached: int = -1
    ended: bool = False
    _slots: NDArray[np.int64] = field(factory=lambda: np.empty(0, np.int64), init=False)
    _queries: NDArray[np.int64] = field(factory=lambda: np.empty(0, np.int64), init=False)
    _columns: tuple[NDArray[np.int32], ...] = field(default=(), init=False)
    _num_read: int = field(default=0, init=False)
    _num_placed: int = field(default=0, init=False)
    _next_position: int = field(default=0, init=False)

    @property
    def num_left(self) -> int:
        """Tokens that it may still sample."""
        return self.max_tokens - len(self.progress.generated_tokens)

    @property
    def num_unread(self) -> int:
        """Tokens of the placed context that have to go through the model before the next one can be drawn."""
        return len(self._queries) - self._num_read

    def place(self, tree: ContextTree) -> None:
        """Find out what is cached, and give slots to the rest."""
        size = len(self.token_ids)
        self.placement = placement = tree.place(self.token_ids, self.layout)
        self._slots = np.concatenate([placement.slots, np.empty(self.num_left, np.int64)])
        # The last token is read in any case: its logits are what the next one is drawn from.
        self._queries = np.union1d(placement.missing, [size - 1])
        self._columns = self.layout.columns(size)
        self._next_position = 1 + int(self._columns[0].max())
        self._num_read, self._num_placed = 0, size
        if self.num_cached < 0:
            self.num_cached = size - len(self._queries)

    def leave(self, tree: ContextTree) -> None:
        """Give up the place in the tree."""
        if self.placement is not None:
            tree.release(self.placement)
            self.placement = None

    def displace(self) -> None:
        """Wait to be placed anew: the tree has been cleared."""
        self.placement = None

    def read(self, num_tokens: int) -> NDArray[np.int64]:
        """Return the indices of the next unread tokens and count them as read."""
        queries = self._queries[self._num_read : self._num_read + num_tokens]
        self._num_read += len(queries)
        return queries

    def reading(self, queries: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Return ids, positions and write slots of some tokens, (q,) each, the slots they read, (n,), and (q, n)."""
        assert self.placement is not None
        positions, block_start, path_start = self._columns
        slots = self._slots[: self._num_placed]
        write = np.where(np.isin(queries, self.placement.missing), slots[queries], TRASH)
        ids = np.array(self.token_ids, np.int64)[queries]
        return ids, positions[queries].astype(np.int64), write, slots, visible_keys(block_start, path_start, queries)

    def feed(self, tree: ContextTree) -> tuple[int, int, NDArray[np.int64]]:
        """Place the token that was sampled last; return its id, its position and the slots that it reads."""
        assert self.placement is not None
        token, position = self.token_ids[-1], self._next_position
        self._slots[self._num_placed] = tree.extend(self.placement, token)
        self._num_placed += 1
        self._next_position += 1
        return token, position, self._slots[: self._num_placed]

    def take(self, token: int, logprob: float) -> None:
        """Keep a sampled token."""
        self.token_ids.append(token)
        self.progress.generated_tokens.append(token)
        self.progress.logprobs.append(logprob)
        self.progress.finished = token in self.sampling.stop_token_ids or not self.num_left


def reading_input(pieces: Sequence[tuple[NDArray[Any], ...]]) -> ForwardInput:
    """Return the pass that reads a piece of each row, as `Row.reading` gives them."""
    ids, positions, write, slots, visible = (list(column) for column in zip(*pieces, strict=True))
    width, length = max(map(len, ids)), max(map(len, slots))
    sees = np.zeros((len(ids), width, length), np.bool_)
    # A pad sees the first key, whatever that is: a row of a softmax must not be empty, and nobody reads the result.
    sees[:, :, 0] = True
    for row, own in enumerate(visible):
        sees[row, width - own.shape[0] :, : own.shape[1]] = own
    return ForwardInput(
        token_ids=padded(ids, right_aligned=True),
        positions=padded(positions, right_aligned=True),
        write=padded(write, right_aligned=True),
        read=padded(slots, right_aligned=False),
        visible=sees,
    )


def decoding_input(fed: Sequence[tuple[int, int, NDArray[np.int64]]]) -> ForwardInput:
    """Return the pass that feeds one token to each row, as `Row.feed` gives them; it sees all that its row reads."""
    tokens, positions, slots = (list(column) for column in zip(*fed, strict=True))
    lengths = np.array([len(each) for each in slots])
    return ForwardInput(
        token_ids=np.array(tokens, np.int64)[:, None],
        positions=np.array(positions, np.int64)[:, None],
        write=np.array([each[-1] for each in slots], np.int64)[:, None],
        read=padded(slots, right_aligned=False),
        visible=(np.arange(lengths.max()) < lengths[:, None])[:, None],
    )
