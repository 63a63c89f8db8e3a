"""Running requests of the layout decoder, and the inputs of their next forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from turnwise.errors import EngineError
from turnwise.layout import Layout, visible_keys
from turnwise.types import SamplingParams
from turnwise_engine_support.grammars import TurnGrammar
from turnwise_engine_support.results import VersionStart
from turnwise_transformers_engine.layouts.context_tree import TRASH, ContextTree, Placement
from turnwise_transformers_engine.layouts.row_pictures import RowPictures
from turnwise_transformers_engine.layouts.slot_cache import ForwardInput, RowSources, pad_rows
from turnwise_transformers_engine.routes import RequestRoutes, RouteStore


@define(eq=False)
class Progress:
    """
    The output of a request so far, with the names of the manager's outputs.

    Attributes:
        generated_tokens: sampled ids.
        logprobs: of these ids.
        spans: index of the first token of each weight version, and the version. Only the decoder appends to it, and
            always before the token, so that another thread finds the version of every token that it finds.
        finished: whether sampling has ended.
    """

    generated_tokens: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    spans: list[VersionStart] = field(factory=list)
    finished: bool = False

    def start_version(self, version: int) -> None:
        """Record the weight version of the next token, before it is added."""
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((len(self.generated_tokens), version))

    def is_finished(self) -> bool:
        """Return whether sampling has ended."""
        return self.finished


@define(eq=False)
class Row:
    """
    A request in the decoder.

    Attributes:
        token_ids: its context and the sampled ids.
        layout: layout of the context; sampled tokens attend to all of it.
        sampling: sampling parameters.
        max_tokens: most tokens to sample.
        generator: random number generator.
        on_end: called once, with an error or None.
        grammar: of its tokens; None if it has none.
        pictures: of its context; None if it has none.
        progress: the output so far.
        placement: its place in the tree; None while it waits.
        num_cached: context tokens in the cache when it was first placed; -1 before.
        ended: whether the request has ended or was cancelled.
        error: that its grammar has ended with; None if there is none.
        routes: of its tokens; None if they are not returned.
    """

    token_ids: list[int]
    layout: Layout
    sampling: SamplingParams
    max_tokens: int
    generator: Any
    on_end: Callable[[Exception | None], None]
    grammar: TurnGrammar | None = None
    pictures: RowPictures | None = None
    progress: Progress = field(factory=Progress)
    placement: Placement | None = None
    num_cached: int = -1
    ended: bool = False
    error: Exception | None = None
    routes: RequestRoutes | None = None
    _slots: NDArray[np.int64] = field(factory=lambda: np.empty(0, np.int64), init=False)
    _queries: NDArray[np.int64] = field(factory=lambda: np.empty(0, np.int64), init=False)
    _columns: tuple[NDArray[np.int32], ...] = field(default=(), init=False)
    _positions: NDArray[np.int64] = field(factory=lambda: np.empty(0, np.int64), init=False)
    _num_prefilled: int = field(default=0, init=False)
    _num_placed: int = field(default=0, init=False)
    _next_position: int = field(default=0, init=False)

    @property
    def num_left(self) -> int:
        """Number of tokens that it may still sample."""
        return self.max_tokens - len(self.progress.generated_tokens)

    @property
    def num_unprefilled(self) -> int:
        """Number of context tokens to prefill before the next token can be sampled."""
        return len(self._queries) - self._num_prefilled

    @property
    def tree_ids(self) -> list[int]:
        """Its ids as the tree knows them: placeholders of another picture are other tokens."""
        return self.token_ids if self.pictures is None else self.pictures.tree_ids(self.token_ids)

    def place(self, tree: ContextTree) -> None:
        """Place the context in the tree: look up cached tokens, and assign slots to the others."""
        size = len(self.token_ids)
        self.placement = placement = tree.place(self.tree_ids, self.layout)
        self._slots = np.concatenate([placement.slots, np.empty(self.num_left, np.int64)])
        # The last token always runs, because the next one is sampled from its logits.
        self._queries = np.union1d(placement.missing, [size - 1])
        self._columns = self.layout.columns(size)
        plain = self._columns[0].astype(np.int64)
        self._positions = plain if self.pictures is None else self.pictures.positions(size)
        self._next_position = 1 + int(self._positions.max())
        self._num_prefilled, self._num_placed = 0, size
        if self.num_cached < 0:
            self.num_cached = size - len(self._queries)

    def leave(self, tree: ContextTree) -> None:
        """Release the place in the tree."""
        if self.placement is not None:
            tree.release(self.placement)
            self.placement = None

    def displace(self) -> None:
        """Forget the place after the tree was cleared; the row must be placed again."""
        self.placement = None
        self.drop_features()

    def drop_features(self) -> None:
        """Forget the features of its pictures, which only its prefill reads."""
        if self.pictures is not None:
            self.pictures.drop_features()

    def take_unprefilled(self, num_tokens: int) -> NDArray[np.int64]:
        """Return the indices of the next tokens to prefill, and count them as prefilled."""
        queries = self._queries[self._num_prefilled : self._num_prefilled + num_tokens]
        self._num_prefilled += len(queries)
        return queries

    def picture_sources(self, queries: NDArray[np.int64]) -> RowSources | None:
        """Return its pictures, and where (q,) tokens find their features; None if they are all text."""
        if self.pictures is None:
            return None
        sources = self.pictures.sources(queries)
        return (self.pictures, sources) if (sources >= 0).any() else None

    def prefill_columns(self, queries: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """
        Return the inputs of some tokens.

        Args:
            queries: (q,) indices of the tokens.

        Returns:
            (q,) ids, (q,) or (3, q) positions, (q,) write slots, (n,) read slots, and (q, n) visibility.
        """
        assert self.placement is not None
        _, block_start, path_start = self._columns
        slots = self._slots[: self._num_placed]
        write = np.where(np.isin(queries, self.placement.missing), slots[queries], TRASH)
        ids = np.array(self.token_ids, np.int64)[queries]
        return ids, self._positions[..., queries], write, slots, visible_keys(block_start, path_start, queries)

    def place_last_token(self, tree: ContextTree) -> tuple[int, int, NDArray[np.int64]]:
        """Place the last sampled token, and return its id, its position and the slots that it reads."""
        assert self.placement is not None
        token, position = self.token_ids[-1], self._next_position
        self._slots[self._num_placed] = tree.extend(self.placement, token)
        self._num_placed += 1
        self._next_position += 1
        return token, position, self._slots[: self._num_placed]

    def note_routes(self, store: RouteStore) -> None:
        """Take the routes of the tokens that have run since the last call."""
        if self.routes is not None and self.routes.num_known < self._num_placed:
            start = self.routes.num_known
            self.routes.extend(start, store.read(self._slots[start : self._num_placed]))

    def add_token(self, token: int, logprob: float) -> None:
        """Append a sampled token, unless its grammar has failed."""
        if self.error is not None:
            self.progress.finished = True
            return
        self.token_ids.append(token)
        self.progress.generated_tokens.append(token)
        self.progress.logprobs.append(logprob)
        self.progress.finished = token in self.sampling.stop_token_ids or not self.num_left
        if self.grammar is not None and not self.progress.finished:
            try:
                self.grammar.read((token,))
            except EngineError as error:
                self.error, self.progress.finished = error, True


def prefill_input(
    chunks: Sequence[tuple[NDArray[Any], ...]], pictures: Sequence[RowSources | None] = ()
) -> ForwardInput:
    """
    Return the input of a pass that prefills a chunk of each row.

    Args:
        chunks: of each row, from `Row.prefill_columns`.
        pictures: of each row, from `Row.picture_sources`.
    """
    ids, positions, write, slots, visible = (list(column) for column in zip(*chunks, strict=True))
    width, length = max(map(len, ids)), max(map(len, slots))
    mask = np.zeros((len(ids), width, length), np.bool_)
    # Padding attends to the first key, because a row of a softmax must not be empty. Its result is never used.
    mask[:, :, 0] = True
    for row, own in enumerate(visible):
        mask[row, width - own.shape[0] :, : own.shape[1]] = own
    return ForwardInput(
        token_ids=pad_rows(ids, right_aligned=True),
        positions=_pad_positions(positions),
        write=pad_rows(write, right_aligned=True),
        read=pad_rows(slots, right_aligned=False),
        visible=mask,
        pictures=tuple(pictures) if any(pictures) else (),
    )


def _pad_positions(positions: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return (B, Q) positions, or (3, B, Q) if a row has three axes; text has the same number on each."""
    if all(each.ndim == 1 for each in positions):
        return pad_rows(positions, right_aligned=True)
    axes = zip(*(np.broadcast_to(each, (3, each.shape[-1])) for each in positions), strict=True)
    return np.stack([pad_rows(list(axis), right_aligned=True) for axis in axes])


def decode_input(placed: Sequence[tuple[int, int, NDArray[np.int64]]]) -> ForwardInput:
    """Return the input of a pass with one token of each row, from `Row.place_last_token`."""
    tokens, positions, slots = (list(column) for column in zip(*placed, strict=True))
    lengths = np.array([len(each) for each in slots])
    return ForwardInput(
        token_ids=np.array(tokens, np.int64)[:, None],
        positions=np.array(positions, np.int64)[:, None],
        write=np.array([each[-1] for each in slots], np.int64)[:, None],
        read=pad_rows(slots, right_aligned=False),
        visible=(np.arange(lengths.max()) < lengths[:, None])[:, None],
    )
