"""Running requests in slabs: their places, and the columns that a decoding step reads."""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray
from torch import Tensor

from turnwise.errors import EngineError
from turnwise_engine_support.grammars import TurnGrammar
from turnwise_transformers_engine.fused.batch_sampling import COLUMNS, SamplingColumns
from turnwise_transformers_engine.fused.slab import Slab
from turnwise_transformers_engine.layouts.rows import Progress
from turnwise_transformers_engine.masks import exclude_ids

_FIRST_LENGTH = 64


@define(eq=False)
class FusedRow:
    """
    A request in the fused decoder.

    Attributes:
        context: ids before the first sampled token.
        stop_token_ids: ids that end it.
        max_tokens: most tokens to sample.
        values: its values for `COLUMNS`.
        on_end: called on the event loop when it has finished, with None, or has failed, with an error.
        grammar: of its tokens; None if it has none.
        progress: output so far.
        num_cached: context tokens in the prefix cache when it was first placed; -1 before.
        num_prefilled: tokens with keys and values, before it decodes.
        ended: whether it has finished or was cancelled.
        error: that ended it; None if it has none.
        group: group with its keys and values; None while it waits.
        index: its row of the group.
    """

    context: list[int]
    stop_token_ids: frozenset[int]
    max_tokens: int
    values: dict[str, Any]
    on_end: Callable[[Exception | None], None]
    grammar: TurnGrammar | None = None
    progress: Progress = field(factory=Progress, init=False)
    num_cached: int = field(default=-1, init=False)
    num_prefilled: int = field(default=0, init=False)
    ended: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)
    group: RowGroup | None = field(default=None, init=False)
    index: int = field(default=-1, init=False)

    @property
    def token_ids(self) -> list[int]:
        """Context and sampled ids."""
        return self.context + self.progress.generated_tokens

    @property
    def num_tokens(self) -> int:
        """Number of context and sampled ids."""
        return len(self.context) + len(self.progress.generated_tokens)

    @property
    def data(self) -> Tensor:
        """Its keys and values, (layers, 2, L, G, D)."""
        assert self.group is not None
        return self.group.slab.data[:, self.index]

    def add_token(self, token: int, logprob: float) -> None:
        """Append a sampled token, unless the row has failed."""
        if self.error is not None:
            return
        progress = self.progress
        progress.generated_tokens.append(token)
        progress.logprobs.append(logprob)
        if token in self.stop_token_ids or len(progress.generated_tokens) >= self.max_tokens:
            progress.finished = True
        elif self.grammar is not None:
            try:
                self.grammar.read((token,))
            except EngineError as error:  # on the decoder's thread, which must go on
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self.error = error
        self.progress.finished = True


@define(eq=False)
class RowGroup:
    """
    The rows of a slab. They are always its first rows.

    Attributes:
        slab: keys and values.
        rows: in the order of the slab.
        next_token: (S,) id that each row runs next.
        position: (S,) place of that id in the row, which is the number of tokens with keys and values.
        columns: (S,) values of each row for `COLUMNS`.
        count: (S,) tokens that each row has sampled.
    """

    slab: Slab
    rows: list[FusedRow] = field(factory=list, init=False)
    next_token: NDArray[np.int64] = field(init=False)
    position: NDArray[np.int64] = field(init=False)
    count: NDArray[np.int64] = field(init=False)
    columns: dict[str, NDArray[Any]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.next_token, self.position, self.count = (np.zeros(0, np.int64) for _ in range(3))
        self.columns = {name: np.zeros(0, kind) for name, kind in COLUMNS.items()}
        self._resize()

    def __len__(self) -> int:
        return len(self.rows)

    def _arrays(self) -> list[NDArray[Any]]:
        return [self.next_token, self.position, self.count, *self.columns.values()]

    def _resize(self) -> None:
        size = self.slab.num_rows
        for array in self._arrays():
            # In place: nothing keeps a view of these arrays over a step.
            array.resize(size, refcheck=False)

    def add(self, row: FusedRow) -> None:
        """Give a row a place."""
        if len(self.rows) == self.slab.num_rows:
            self.slab.reserve(len(self.rows) + 1)
            self._resize()
        row.group, row.index = self, len(self.rows)
        self.rows.append(row)
        self.position[row.index] = row.num_tokens
        for name, value in row.values.items():
            self.columns[name][row.index] = value

    def remove(self, row: FusedRow) -> None:
        """Take the place of a row."""
        self._close(row.index)
        row.group, row.index = None, -1

    def start_decoding(self, row: FusedRow, token: int) -> None:
        """Let a prefilled row run a sampled token."""
        self.next_token[row.index] = token
        self.count[row.index] = len(row.progress.generated_tokens)

    def move_to(self, row: FusedRow, larger: RowGroup) -> None:
        """Move a decoding row to a group of longer rows."""
        source, written = row.index, int(self.position[row.index])
        token, known = int(self.next_token[source]), self.slab.data[:, source, :, :written]
        larger.add(row)
        larger.slab.data[:, row.index, :, :written] = known
        larger.position[row.index] = written
        larger.start_decoding(row, token)
        self._close(source)

    def _close(self, hole: int) -> None:
        """Move the last row into a hole."""
        last = self.rows.pop()
        source = len(self.rows)
        if hole == source:
            return
        self.slab.move(source, hole, int(self.position[source]))
        for array in self._arrays():
            array[hole] = array[source]
        self.rows[hole], last.index = last, hole


@define(eq=False)
class RowBatch:
    """
    All rows with keys and values, by the capacity of their slabs.

    Attributes:
        make_slab: makes an empty slab of a length.
        max_length: most tokens of a row.
    """

    make_slab: Callable[[int], Slab]
    max_length: int
    _groups: dict[int, RowGroup] = field(factory=dict, init=False)

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    @property
    def rows(self) -> list[FusedRow]:
        """All rows."""
        return [row for group in self._groups.values() for row in group.rows]

    def clear(self) -> list[FusedRow]:
        """Take the places of all rows, and return these."""
        rows = self.rows
        for row in rows:
            row.group, row.index, row.num_prefilled = None, -1, 0
        for group in self._groups.values():
            group.rows.clear()
        return rows

    def group_for(self, num_tokens: int) -> RowGroup:
        """Return the group of the shortest rows that hold a number of tokens."""
        length = _FIRST_LENGTH
        while length < num_tokens:
            length *= 2
        length = min(length, self.max_length)
        if length not in self._groups:
            self._groups[length] = RowGroup(self.make_slab(length))
        return self._groups[length]

    def groups(self) -> list[RowGroup]:
        """Return the groups with rows, each with space for one more token of every row."""
        for group in list(self._groups.values()):
            size = len(group)
            for index in np.flatnonzero(group.position[:size] >= group.slab.length)[::-1].tolist():
                group.move_to(group.rows[index], self.group_for(group.slab.length + 1))
        return [group for group in self._groups.values() if group.rows]

    def num_pages(self, page_size: int) -> int:
        """Return the pages that the rows would fill, the next token of each included."""
        return sum(int((group.position[: len(group)] // page_size + 1).sum()) for group in self._groups.values())


def apply_grammars(logits: Tensor, rows: Sequence[FusedRow]) -> None:
    """Take the ids that the grammars of rows exclude out of (B, V) logits, in place; a row may fail by that."""
    states = {index: row.grammar for index, row in enumerate(rows) if row.grammar is not None}
    for index, error in exclude_ids(logits, states).items():
        rows[index].fail(error)


def sampling_columns(groups: Sequence[RowGroup]) -> SamplingColumns:
    """Return the sampling columns of the rows of some groups."""
    columns = {name: join([group.columns[name][: len(group)] for group in groups]) for name in COLUMNS}
    return SamplingColumns(**columns, count=join([group.count[: len(group)] for group in groups]))


def join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate; a single array is copied."""
    return arrays[0].copy() if len(arrays) == 1 else np.concatenate(arrays)
