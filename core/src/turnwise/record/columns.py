"""
Growable columns of a token record, and the three ways to append to it.

`turnwise.record.trajectory` builds on it and adds blocks of paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, DTypeLike, NDArray

from turnwise.errors import TrajectoryError
from turnwise.types import Array, FloatArray, TokenArray, as_float_array, as_token_array

NO_VERSION: Final = -1
"""Weight version of a token that no policy sampled."""

DTYPES: Final[dict[str, DTypeLike]] = {
    "token_ids": np.int32,
    "logprobs": np.float32,
    "origins": np.uint8,
    "weight_versions": np.int32,
    "position_ids": np.int32,
    "block_start": np.int32,
    "path_start": np.int32,
}
_FIRST_CAPACITY: Final = 1024


class TokenColumns:
    """
    Growable columns of one length, a row per token, appended in O(new rows) and read as views.

    Views are read-only and stay valid, because a column only grows after them.
    """

    __slots__ = ("_arrays", "_capacity", "_size")

    def __init__(self, arrays: Mapping[str, Array] | None = None) -> None:
        """Start empty, or with given arrays, which are never written to: appending makes new ones."""
        if arrays is None:
            self._arrays = {name: np.empty(_FIRST_CAPACITY, dtype) for name, dtype in DTYPES.items()}
            self._size = 0
        else:
            self._arrays = {name: arrays[name] for name in DTYPES}
            self._size = len(arrays["token_ids"])
        self._capacity = len(self._arrays["token_ids"])

    def __len__(self) -> int:
        return self._size

    def extend(self, num_rows: int, **values: ArrayLike) -> None:
        """Append rows; each column is given (num_rows,) values, or one value for all of them."""
        start, stop = self._size, self._size + num_rows
        if stop > self._capacity:
            self._grow(stop)
        for name, array in self._arrays.items():
            array[start:stop] = values[name]
        self._size = stop

    def view(self, name: str, start: int = 0) -> np.ndarray:
        """Return a read-only view of one column from row `start` on."""
        view = self._arrays[name][start : self._size]
        view.flags.writeable = False
        return view

    def _grow(self, num_rows: int) -> None:
        # New arrays rather than a resize in place: views that are out keep the memory they were taken from.
        self._capacity = max(num_rows, 2 * self._capacity)
        for name, array in self._arrays.items():
            grown = np.empty(self._capacity, array.dtype)
            grown[: self._size] = array[: self._size]
            self._arrays[name] = grown


class Origin(IntEnum):
    """
    Where a token came from. The response mask is 1 exactly on `ACTION`.

    A `REPLAYED` token was sampled in another record of the episode, which trains it: attention sees it, the loss does
    not. It keeps its log-probability and its weight version.
    """

    PROMPT = 0
    ACTION = 1
    OBSERVATION = 2
    FORCED = 3
    REPLAYED = 4


@frozen
class Segment:
    """
    A run of response tokens of one origin, in one path.

    Attributes:
        origin: action, observation, forced or replayed.
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

    __slots__ = ("_columns", "_next_position", "_segments")

    def __init__(self, next_position: int) -> None:
        self._columns = TokenColumns()
        self._segments: list[Segment] = []
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
        where = self._columns.view("origins") == Origin.ACTION
        ids, logprobs = (self._columns.view(name)[where] for name in ("token_ids", "logprobs"))
        return as_token_array(ids), as_float_array(logprobs)

    def add_action(self, token_ids: ArrayLike, logprobs: ArrayLike, weight_version: int | ArrayLike = 0) -> None:
        """
        Append tokens that the policy sampled (mask 1).

        Args:
            token_ids: (n,) ids, exactly as the engine returned them; n may be 0.
            logprobs: (n,) log-probability of each id under the distribution it was sampled from.
            weight_version: counter of the weights that sampled them, from 0; or (n,) one for each id.

        Raises:
            TrajectoryError: lengths differ, a log-probability is not finite, or a version is negative.
        """
        ids, values = as_tokens(token_ids), as_float_array(logprobs)
        if len(ids) != len(values):
            raise TrajectoryError(f"{len(ids)} token ids but {len(values)} log-probabilities")
        if not np.isfinite(values).all():
            raise TrajectoryError(f"log-probability {int(np.isfinite(values).argmin())} is not finite")
        self._append(Origin.ACTION, ids, values, _versions(weight_version, len(ids)))

    def add_observation(self, token_ids: ArrayLike) -> None:
        """Append tokens of a tool, user or environment (mask 0): (n,) ids."""
        self._append(Origin.OBSERVATION, as_tokens(token_ids))

    def add_forced(self, token_ids: ArrayLike) -> None:
        """Append tokens that the harness inserts into the model's turn (mask 0): (n,) ids."""
        self._append(Origin.FORCED, as_tokens(token_ids))

    def _append(
        self, origin: Origin, ids: TokenArray, logprobs: ArrayLike = 0.0, versions: ArrayLike = NO_VERSION
    ) -> None:
        self._check_open()
        if len(ids) == 0:
            return
        start, position = len(self._columns), self._next_position
        self._columns.extend(
            len(ids),
            token_ids=ids,
            logprobs=logprobs,
            origins=origin,
            weight_versions=versions,
            position_ids=np.arange(position, position + len(ids)),
            block_start=0,
            path_start=0,
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
    if ids.size and int(ids.min()) < 0:
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
