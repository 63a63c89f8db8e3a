"""
Growable columns of a token record, and the three ways to append to it.

`turnwise.record.trajectory` builds on it and adds blocks of paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, DTypeLike, NDArray

from turnwise.errors import TrajectoryError
from turnwise.record.column_specs import CORE_COLUMNS, ColumnSpec
from turnwise.record.column_specs import NO_VERSION as NO_VERSION
from turnwise.record.pictures import Pictures, shifted, split_media
from turnwise.types import Array, FloatArray, MediaTokens, TokenArray, as_float_array, as_token_array

DTYPES: Final[Mapping[str, DTypeLike]] = {name: spec.dtype for name, spec in CORE_COLUMNS.items()}
_SPARE_ROWS: Final = 64
_WITHOUT_BLOCKS: Final = frozenset({"position_ids", "block_start", "path_start"})
"""Columns without memory until a value differs from 0, 1, 2, ... or from 0: most records have no block."""
_IN_PROMPT: Final = tuple(spec.name for spec in CORE_COLUMNS.values() if spec.of_responses)
"""Columns without memory for the prompt, whose tokens hold the fill of the column."""
_ZERO: Final = bytes(4)


class TokenColumns:
    """
    Growable columns of one length, a row per token, appended in O(new rows) and read as views.

    Views are read-only and stay valid, because a column only grows after them.
    """

    __slots__ = ("_arrays", "_capacity", "_first", "_size", "open")

    def __init__(self, arrays: Mapping[str, Array] | None = None, specs: Iterable[ColumnSpec] = ()) -> None:
        """
        Start empty, or with given arrays, which are never written to: appending makes new ones.

        The columns about blocks may be missing; the columns of `_IN_PROMPT` may all start behind the prompt. `specs`
        declare the arrays that are not the core's, which have a value for each token; they are in `open`, by name.
        """
        given = arrays or {}
        self.open = {spec.name: spec for spec in specs}
        self._arrays: dict[str, Array] = {**given}
        for name, dtype in DTYPES.items():
            if name not in given and name not in _WITHOUT_BLOCKS:
                self._arrays[name] = np.empty(0, dtype)
        self._size = self._capacity = len(self._arrays["token_ids"])
        self._first = dict.fromkeys((*_IN_PROMPT, *self.open), 0)
        for name in self._first:
            self._first[name] = self._size - len(self._arrays[name])

    def __len__(self) -> int:
        return self._size

    @property
    def names(self) -> tuple[str, ...]:
        """The core's columns and the open ones."""
        return (*DTYPES, *self.open)

    def extend(self, num_rows: int, /, **values: ArrayLike) -> None:
        """Append rows; a column is given (num_rows,) values, or one value for all of them, or is 0, or its fill."""
        start, stop = self._size, self._size + num_rows
        if stop > self._capacity:
            self._grow(stop)
        for name, value in values.items():
            if name not in self._arrays:
                if 0 not in (_follow(name, start, stop) == value).tobytes():
                    continue
                self._arrays[name] = np.append(_follow(name, 0, start), np.zeros(self._capacity - start, np.int32))
            first = self._first.get(name, 0)
            self._arrays[name][start - first : stop - first] = value
        for name, spec in self.open.items():
            if name not in values:
                first = self._first[name]
                self._arrays[name][start - first : stop - first] = spec.fill
        self._size = stop

    def put(self, spec: ColumnSpec, first: int, values: Array | None = None) -> None:
        """Add or replace an open column: (rows from `first` on, *shape) values, or the fill of all rows."""
        array = spec.filled(self._capacity - first)
        if values is not None:
            array[: self._size - first] = values
        self.open[spec.name], self._first[spec.name], self._arrays[spec.name] = spec, first, array

    def write(self, name: str, where: NDArray[np.int64], values: Array) -> None:
        """Replace the values of some rows of an open column, in new memory: views that are out stay valid."""
        array = self._arrays[name].copy()
        array[where - self._first[name]] = values
        self._arrays[name] = array

    def view(self, name: str, start: int = 0) -> np.ndarray:
        """Return a read-only view of one column from row `start` on; a copy, if that is in a prompt without memory."""
        array, first = self._arrays.get(name), self._first.get(name, 0)
        if array is None:
            view = _follow(name, start, self._size)
        elif start >= first:
            view = array[start - first : self._size - first]
        else:
            prompt = (self.open.get(name) or CORE_COLUMNS[name]).filled(first - start)
            view = np.concatenate([prompt, array[: self._size - first]])
        view.flags.writeable = False
        return view

    def _grow(self, num_rows: int) -> None:
        # New arrays rather than a resize in place: views that are out keep the memory they were taken from.
        # By a quarter: many idle records must fit into memory, and the copies of a long one are still O(1) for a row.
        self._capacity = num_rows + num_rows // 4 + _SPARE_ROWS
        for name, array in self._arrays.items():
            first = self._first.get(name, 0)
            grown = np.zeros((self._capacity - first, *array.shape[1:]), array.dtype)
            grown[: self._size - first] = array[: self._size - first]
            self._arrays[name] = grown


@cache
def _count(size: int) -> TokenArray:
    return np.broadcast_to(np.arange(size, dtype=np.int32), size)  # read-only


def _follow(name: str, start: int, stop: int) -> Array:
    """Return rows of a column of `_WITHOUT_BLOCKS` without a block; all records share the memory."""
    if name == "position_ids":
        return _count(1 << stop.bit_length())[start:stop]
    return np.ndarray(stop - start, np.int32, _ZERO, strides=(0,))


class Origin(IntEnum):
    """
    Where a token came from. The response mask is 1 exactly on `ACTION`.

    Attention sees all tokens. Replayed and constrained ones have a log-probability and a weight version too, but the
    loss does not see them. A `REPLAYED` token was sampled in another record of the episode, which trains its actions. A
    `CONSTRAINED` token was sampled under a grammar, so its log-probability is that of a distribution without the ids
    that the grammar excluded, which a trainer does not know.

    Attributes:
        is_sampled: the token has a log-probability and a weight version.
        is_turn: the token belongs to a turn of the model that was sampled in this record.
    """

    PROMPT = 0
    ACTION = 1
    OBSERVATION = 2
    FORCED = 3
    REPLAYED = 4
    CONSTRAINED = 5

    @property
    def is_sampled(self) -> bool:
        return self.is_turn or self is Origin.REPLAYED

    @property
    def is_turn(self) -> bool:
        return self is Origin.ACTION or self is Origin.CONSTRAINED


_SAMPLED: Final = np.array([origin.is_sampled for origin in Origin])
_IN_TURN: Final = np.array([origin.is_turn for origin in Origin])


def is_sampled(origins: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return, for each origin, whether its token has a log-probability and a weight version."""
    return _SAMPLED[origins]


def is_in_turn(origins: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return, for each origin, whether its token belongs to a turn that was sampled in its record."""
    return _IN_TURN[origins]


@frozen
class Segment:
    """
    A run of response tokens of one origin, in one path.

    Attributes:
        origin: any but `PROMPT`.
        start: index of the first token: absolute, or among the path's own tokens before a join.
        stop: index after the last token.
        block: which block of paths it lies in, counted from 0; -1 outside.
        path: which path of its block, counted from 0; -1 outside.
    """

    origin: Origin
    start: int
    stop: int
    block: int = -1
    path: int = -1


class TokenRecord:
    """The common part of a trajectory and a path: three ways to append, and nothing to set."""

    __slots__ = ("_columns", "_next_position", "_pictures", "_segments")

    def __init__(self, next_position: int) -> None:
        self._columns = TokenColumns()
        self._segments: list[Segment] = []
        self._pictures: Pictures = ()
        self._next_position = next_position

    def __len__(self) -> int:
        """Return the number of tokens that this record holds itself."""
        return len(self._columns)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Every append so far, in order; appends of no tokens leave none."""
        return tuple(self._segments)

    def sampled(self) -> tuple[TokenArray, FloatArray]:
        """Return (n,) ids that the policy sampled here, in order, and (n,) their log-probabilities."""
        where = is_in_turn(self._columns.view("origins"))
        ids, logprobs = (self._columns.view(name)[where] for name in ("token_ids", "logprobs"))
        return as_token_array(ids), as_float_array(logprobs)

    def sampled_columns(self) -> Mapping[str, Array] | None:
        """Return the values of open columns of the tokens of `sampled`; None without any."""
        where = is_in_turn(self._columns.view("origins"))
        return {name: self._columns.view(name)[where] for name in self._columns.open} or None

    def add_action(
        self,
        token_ids: ArrayLike,
        logprobs: ArrayLike,
        weight_version: int | ArrayLike = 0,
        *,
        constrained: bool = False,
        columns: Sequence[tuple[ColumnSpec, ArrayLike]] = (),
    ) -> None:
        """
        Append tokens that the policy sampled (mask 1, or 0 if a grammar constrained them).

        Args:
            token_ids: (n,) ids, exactly as the engine returned them; n may be 0.
            logprobs: (n,) log-probability of each id under the distribution it was sampled from.
            weight_version: counter of the weights that sampled them, from 0; or (n,) one for each id.
            constrained: they were sampled under a grammar.
            columns: (n, *shape) values of open columns; of one for all tokens perhaps (T + n, *shape), where T are the
                tokens of `input_ids` before. Tokens before that have no value take theirs from there.

        Raises:
            TrajectoryError: lengths differ, a log-probability is not finite, a version is negative, or values do not
                fit their column.
        """
        ids, values = as_tokens(token_ids), as_float_array(logprobs)
        if len(ids) != len(values):
            raise TrajectoryError(f"{len(ids)} token ids but {len(values)} log-probabilities")
        if 0 in np.isfinite(values).tobytes():  # half the time of a reduction
            raise TrajectoryError(f"log-probability {int(np.isfinite(values).argmin())} is not finite")
        origin = Origin.CONSTRAINED if constrained else Origin.ACTION
        open_values = self._read_columns(columns, len(ids)) if columns else {}
        self._append(origin, ids, values, _versions(weight_version, len(ids)), **open_values)

    def add_observation(self, token_ids: ArrayLike | MediaTokens) -> None:
        """Append tokens of a tool, user or environment (mask 0): (n,) ids, perhaps with pictures."""
        ids, pictures = split_media(token_ids)
        start = len(self)
        self._append(Origin.OBSERVATION, as_tokens(ids))
        if pictures:
            self._pictures += shifted(pictures, start)

    def add_forced(self, token_ids: ArrayLike) -> None:
        """Append tokens that the harness inserts into the model's turn (mask 0): (n,) ids."""
        self._append(Origin.FORCED, as_tokens(token_ids))

    @property
    def _num_before(self) -> int:
        """Number of the tokens of `input_ids` before the record's own."""
        return 0

    @property
    def _first_response(self) -> int:
        """Index of the first own token that a column of response tokens has a value for."""
        return 0

    def _read_columns(self, columns: Sequence[tuple[ColumnSpec, ArrayLike]], num_new: int) -> dict[str, Array]:
        """Return the values of new tokens by column, and set the values of the context."""
        self._check_open()
        found: dict[str, Array] = {}
        for spec, given in columns:
            values, held = spec.read(given), self._columns.open.get(spec.name, spec)
            num_context = self._num_before + len(self)
            has_context = len(values) == num_context + num_new and num_context > 0 and not spec.of_responses
            if len(values) != num_new and not has_context:
                raise TrajectoryError(f"column {spec.name!r} has {len(values)} values for {num_new} tokens")
            if held != spec:
                raise TrajectoryError(f"column {spec.name!r} is declared otherwise than in the record: {held}")
            if spec.tokens == "none":
                raise TrajectoryError(f"column {spec.name!r} has no values of sampled tokens: a scorer gives them")
            if spec.name not in self._columns.open:
                self._columns.put(spec, self._first_response if spec.of_responses else 0)
            if has_context:
                # The first value stays: it is of the forward pass whose output the next token was sampled from.
                where = np.flatnonzero(spec.is_fill(self._columns.view(spec.name)))
                self._columns.write(spec.name, where, values[self._num_before + where])
            found[spec.name] = values[len(values) - num_new :]
        return found

    def _append(
        self,
        origin: Origin,
        ids: TokenArray,
        logprobs: ArrayLike = 0.0,
        versions: ArrayLike = NO_VERSION,
        /,  # an open column may have any of these names
        **open_values: ArrayLike,
    ) -> None:
        self._check_open()
        if len(ids) == 0:
            return
        start, position = len(self._columns), self._next_position
        self._columns.extend(
            len(ids),
            token_ids=ids,
            logprobs=logprobs,
            origins=int(origin),
            weight_versions=versions,
            position_ids=_follow("position_ids", position, position + len(ids)),
            **open_values,
        )
        self._next_position = position + len(ids)
        self._segments.append(Segment(origin, start, start + len(ids)))

    def _check_open(self) -> None:
        """Raise `TrajectoryError` when no token may be appended here."""


def as_tokens(token_ids: ArrayLike) -> TokenArray:
    """Return (n,) int32 ids; `TrajectoryError` for any other value."""
    try:
        ids = as_token_array(token_ids)
    except ValueError as error:
        raise TrajectoryError(str(error)) from error
    if ids.size and np.minimum.reduce(ids) < 0:
        raise TrajectoryError(f"token id {int(ids.min())} is negative")
    return ids


def _versions(weight_version: int | ArrayLike, num_tokens: int) -> int | NDArray[np.int32]:
    if isinstance(weight_version, int) and 0 <= weight_version < 2**31:
        return weight_version
    versions = np.asarray(weight_version, np.int32)
    if versions.ndim > 1 or (versions.ndim == 1 and len(versions) != num_tokens):
        raise TrajectoryError(f"weight_version must be one int or {num_tokens} of them, got shape {versions.shape}")
    if versions.size and int(versions.min()) < 0:
        raise TrajectoryError("weight_version must be at least 0")
    return versions
