"""
The token record: the one place where masks, positions and log-probabilities come from.

A `Trajectory` is a prompt and the segments appended after it. Agents append. They cannot set masks, positions or
visibility, which follow from the origins of segments and from forks and joins. Appending costs O(new tokens).
The record does not know text, rewards or padding.

Layout (parallel thinking as in Parallel-R1, arXiv:2509.07980, for any number of paths): with absolute indices q, k
``visible(q, k) = k <= q and (k < block_start[q] or k >= path_start[q])``. Every path of a block starts at one position
p; the first token after the block gets p + the longest path's length, which equals
``1 + max(position of the visible k < q)``.

Shapes: P prompt tokens, R response tokens, T = P + R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from attrs import evolve
from numpy.typing import ArrayLike

from turnwise.errors import TrajectoryError
from turnwise.layout import Layout
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.columns import DTYPES, Origin, Segment, TokenColumns, TokenRecord, as_tokens, is_in_turn
from turnwise.record.open_columns import empty_replayed, put_column, restore_open, save_open
from turnwise.record.pictures import Pictures, before, read_pictures, shifted, split_media, whole_before
from turnwise.record.views import RecordViews
from turnwise.types import Array, MediaTokens, TokenArray


class Mark(NamedTuple):
    """The number of tokens of a record, and of each open path, at some time; made by `Trajectory.mark`."""

    num_tokens: int
    paths: tuple[tuple[Path, int], ...] = ()


class Path(TokenRecord):
    """
    One path of an open block: it sees its trajectory up to the fork and itself, never its siblings.

    `Trajectory.fork` makes it. After `Trajectory.join` it accepts no more tokens.
    """

    __slots__ = ("_joined", "_trajectory", "index")

    def __init__(self, trajectory: Trajectory, index: int) -> None:
        super().__init__(trajectory.next_position)
        self._trajectory = trajectory
        self._joined = False
        self.index = index

    @property
    def trajectory(self) -> Trajectory:
        """The trajectory that forked."""
        return self._trajectory

    @property
    def own_ids(self) -> TokenArray:
        """(n,) the path's own ids."""
        return self._columns.view("token_ids")

    @property
    def input_ids(self) -> TokenArray:
        """(T + n,) all ids that the path sees: the trajectory up to the fork, then its own."""
        return np.concatenate([self._trajectory.input_ids, self._columns.view("token_ids")])

    @property
    def pictures(self) -> Pictures:
        """The pictures that the path sees, with their places in `input_ids`."""
        return self._trajectory.pictures + shifted(self._pictures, len(self._trajectory))

    @property
    def position_ids(self) -> TokenArray:
        """(T + n,) the positions of `input_ids`."""
        return np.concatenate([self._trajectory.position_ids, self._columns.view("position_ids")])

    @property
    def layout(self) -> Layout:
        """The layout of `input_ids`: the path continues the trajectory like plain text."""
        return self._trajectory.layout

    @property
    def num_response_tokens(self) -> int:
        """Response tokens in the path's context: the trajectory's up to the fork and its own."""
        return self._trajectory.num_response_tokens + len(self)

    def fork(self, num_paths: int) -> tuple[Path, ...]:
        """Refuse: two ints per token describe one level of paths, not nested ones."""
        raise TrajectoryError(f"a path cannot fork into {num_paths}: nested blocks have no layout")

    def _check_open(self) -> None:
        if self._joined:
            raise TrajectoryError(f"path {self.index} was joined: append to the trajectory instead")

    @property
    def _num_before(self) -> int:
        return len(self._trajectory)

    def _saved(self, num_tokens: int) -> dict[str, Any]:
        own = {name: self._columns.view(name)[:num_tokens].copy() for name in _OWN}
        own |= save_open(self._columns, num_tokens) | {"segments": _plain(self._segments, num_tokens)}
        return own | ({"pictures": pictures} if (pictures := before(self._pictures, num_tokens)) else {})

    def _restore(self, saved: dict[str, Any]) -> None:
        ids, logprobs, versions = (np.asarray(saved[name]) for name in _OWN)
        for origin, start, stop, *_place in saved["segments"]:
            piece = slice(start, stop)
            self._append(Origin(origin), as_tokens(ids[piece]), logprobs[piece], versions[piece])
        for spec, values in restore_open(saved, len(self)):
            self._columns.put(spec, 0, values)
        self._pictures = read_pictures(saved.get("pictures", ()), self.own_ids)


class Trajectory(RecordViews):
    """
    Append-only token record of an episode.

    Example:
        >>> t = Trajectory([5, 6])
        >>> t.add_action([7, 8], [-0.1, -0.2], weight_version=3)
        >>> t.add_observation([9])
        >>> t.response_mask.tolist()
        [1, 1, 0]
    """

    __slots__ = ("_is_closed", "_num_blocks", "_open_paths")

    def __init__(self, prompt_ids: ArrayLike | MediaTokens) -> None:
        """Start a record with (P,) prompt ids, perhaps with pictures; P may be 0."""
        given, pictures = split_media(prompt_ids)
        ids = as_tokens(given)
        super().__init__(next_position=len(ids))
        self._num_blocks = 0
        self._open_paths: tuple[Path, ...] = ()
        self._is_closed = False
        self._pictures = pictures
        self.num_prompt_tokens = len(ids)
        self._columns = TokenColumns({"token_ids": ids.copy()})

    @property
    def next_position(self) -> int:
        """Position that the next token appended here would get."""
        return self._next_position

    @property
    def has_blocks(self) -> bool:
        """Whether any token lies in a path, so that positions are not just 0..T-1."""
        return self._num_blocks > 0

    @property
    def layout(self) -> Layout:
        """The places of the paths of joined blocks."""
        runs: list[tuple[int, int, int]] = []
        place = (-1, -1)
        for segment in self._segments:
            follows, place = (segment.block, segment.path) == place, (segment.block, segment.path)
            if segment.block >= 0:
                start = runs.pop()[1] if follows else segment.start
                runs.append((int(self.block_start[start]), start, segment.stop))
        return Layout(tuple(runs))

    # Forks

    @property
    def open_paths(self) -> tuple[Path, ...]:
        """The paths of the open block; empty when no block is open."""
        return self._open_paths

    def fork(self, num_paths: int) -> tuple[Path, ...]:
        """
        Open a block of at least one path. The paths see this record so far and not each other.

        Until `join`, tokens go to the paths and not to the trajectory.

        Raises:
            TrajectoryError: a block is open already, or `num_paths` is below 1.
        """
        self._check_open()
        if num_paths < 1:
            raise TrajectoryError(f"a block needs at least 1 path, not {num_paths}")
        self._open_paths = tuple(Path(self, index) for index in range(num_paths))
        return self._open_paths

    def join(self, paths: Sequence[Path]) -> None:
        """
        Close the open block: append all paths of `fork`, in that order; later tokens see all of them.

        Raises:
            TrajectoryError: these are not the paths of the open block.
        """
        if not self._open_paths:
            raise TrajectoryError("no block is open: call fork first")
        if len(paths) != len(self._open_paths) or any(a is not b for a, b in zip(paths, self._open_paths, strict=True)):
            raise TrajectoryError(f"join takes the {len(self._open_paths)} paths of the open block, in their order")
        block_start, self._open_paths = len(self._columns), ()
        for path in paths:
            self._take(path, block_start)
        self._next_position += max(len(path) for path in paths)
        self._num_blocks += any(map(len, paths))  # a block without tokens leaves no trace in the record

    def _take(self, path: Path, block_start: int) -> None:
        path._joined = True  # noqa: SLF001 - the record and its paths are one idea in two classes
        start = len(self._columns)
        own = path._columns  # noqa: SLF001 - as above
        shared = ("token_ids", "logprobs", "origins", "weight_versions", "position_ids", *own.open)
        self._adopt(own.open.values())
        self._columns.extend(
            len(own), block_start=block_start, path_start=start, **{name: own.view(name) for name in shared}
        )
        self._pictures += shifted(path._pictures, start)  # noqa: SLF001 - as above
        self._segments += [
            Segment(s.origin, s.start + start, s.stop + start, self._num_blocks, path.index) for s in path.segments
        ]

    def _adopt(self, specs: Iterable[ColumnSpec]) -> None:
        """Add the open columns that paths have."""
        for spec in specs:
            held = self._columns.open.get(spec.name)
            if held is None:
                self._columns.put(spec, self._first_response if spec.of_responses else 0)
            elif held != spec:
                raise TrajectoryError(f"column {spec.name!r} is declared otherwise in a path: {held}")

    def close(self) -> None:
        """Refuse further tokens. A block that is still open is joined, so that its tokens are kept."""
        if self._open_paths:
            self.join(self._open_paths)
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise TrajectoryError("the record is closed: the episode has ended, or close_record was called")
        self._check_joined()

    def _check_joined(self) -> None:
        if self._open_paths:
            raise TrajectoryError("a block is open: append to its paths, or join them first")

    # Derived records

    def truncated(self, response_budget: int) -> Trajectory:
        """
        Return a new record with at most the first `response_budget` response tokens.

        A cut inside a block keeps the isolation of the paths that remain. A cut inside a picture leaves it out.

        Raises:
            TrajectoryError: the budget is negative, or a block is open.
        """
        self._check_joined()
        if response_budget < 0:
            raise TrajectoryError(f"response_budget must be at least 0, not {response_budget}")
        stop = whole_before(self._pictures, min(len(self._columns), self.num_prompt_tokens + response_budget))
        kept = [evolve(s, stop=min(s.stop, stop)) for s in self._segments if s.start < stop]
        return self._with(self._copied(stop), kept)

    def branched(self, mark: Mark) -> Trajectory:
        """
        Return a new record with the tokens of this one up to a mark; its sampled tokens become `Origin.REPLAYED`.

        So each sampled token belongs to a turn of one record alone, however many records share it.

        Raises:
            TrajectoryError: a block was open at the mark, or the mark does not fit this record.
        """
        if mark.paths or not self.num_prompt_tokens <= mark.num_tokens <= len(self._columns):
            raise TrajectoryError("a record branches at its own marks, which were made with no block open")
        columns = self._copied(mark.num_tokens)
        empty_replayed(columns, self._columns.open.values())
        columns["origins"][is_in_turn(columns["origins"])] = Origin.REPLAYED
        shared = [s for s in self._segments if s.start < mark.num_tokens]
        segments = [evolve(s, origin=Origin.REPLAYED) if s.origin.is_turn else s for s in shared]
        return self._with(columns, segments)

    def with_column(self, spec: ColumnSpec, values: ArrayLike) -> Trajectory:
        """
        Return a new record with an open column of a scorer, in place of one with the same declaration.

        Args:
            spec: declaration of the column.
            values: (T, *shape) for a column of all tokens, otherwise (R, *shape).

        Raises:
            TrajectoryError: a block is open, the values do not fit the column, or one of tokens that the policy did not
                sample differs from the fill of a column of sampled tokens.
        """
        self._check_joined()
        columns = self._copied(len(self))
        specs = put_column(columns, self.columns, spec, values, self.num_prompt_tokens)
        return self._with(columns, list(self._segments), specs)

    def _copied(self, num_tokens: int) -> dict[str, Any]:
        return {name: self._columns.view(name)[:num_tokens].copy() for name in self._columns.names}

    def _with(
        self, columns: dict[str, Any], segments: list[Segment], specs: Iterable[ColumnSpec] | None = None
    ) -> Trajectory:
        kept = self._columns.open.values() if specs is None else specs
        pictures = before(self._pictures, len(columns["token_ids"]))
        return Trajectory.from_columns(columns, segments, self.num_prompt_tokens, kept, pictures)

    # Saving, also with a block open

    def mark(self) -> Mark:
        """Return the current size of this record, for `rewound` and `branched`; O(open paths)."""
        return Mark(len(self._columns), tuple([(path, len(path)) for path in self._open_paths]))

    def rewound(self, mark: Mark) -> Trajectory:
        """Return a new record with the state of this one at a mark, its open paths included."""
        return Trajectory.from_dict(self._saved(mark))

    def to_dict(self) -> dict[str, Any]:
        """Return arrays and plain lists that `from_dict` restores, without spare memory."""
        return self._saved(self.mark())

    def _saved(self, mark: Mark) -> dict[str, Any]:
        saved: dict[str, object] = {name: self._columns.view(name)[: mark.num_tokens].copy() for name in DTYPES}
        saved |= save_open(self._columns, mark.num_tokens)
        saved["num_prompt_tokens"] = self.num_prompt_tokens
        saved["segments"] = _plain(self._segments, mark.num_tokens)
        if pictures := before(self._pictures, mark.num_tokens):
            saved["pictures"] = pictures
        if mark.paths:
            saved["open_paths"] = [path._saved(size) for path, size in mark.paths]  # noqa: SLF001 - one idea
        return saved

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Trajectory:
        """
        Restore a record from the result of `to_dict`; tokens can be appended to it.

        Raises:
            TrajectoryError: a column is missing or the columns differ in length, also in an open path.
        """
        missing = [name for name in (*DTYPES, "segments", "num_prompt_tokens") if name not in saved]
        if missing:
            raise TrajectoryError(f"a saved trajectory lacks {', '.join(missing)}")
        columns = {name: np.array(saved[name], dtype) for name, dtype in DTYPES.items()}
        if len({len(column) for column in columns.values()}) != 1:
            raise TrajectoryError("the columns of a saved trajectory differ in length")
        found = restore_open(saved, len(columns["token_ids"]))
        columns |= {spec.name: values for spec, values in found}
        segments = [Segment(Origin(origin), *rest) for origin, *rest in saved["segments"]]
        specs = [spec for spec, _values in found]
        pictures = read_pictures(saved.get("pictures", ()), columns["token_ids"])
        trajectory = cls.from_columns(columns, segments, int(saved["num_prompt_tokens"]), specs, pictures)
        if open_paths := saved.get("open_paths"):
            for path, own in zip(trajectory.fork(len(open_paths)), open_paths, strict=True):
                path._restore(own)  # noqa: SLF001 - the record and its paths are one idea in two classes
        return trajectory

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Array],
        segments: list[Segment],
        num_prompt_tokens: int,
        specs: Iterable[ColumnSpec] = (),
        pictures: Pictures = (),
    ) -> Trajectory:
        """
        Return a record of (T,) arrays, by the names and of the types in `columns.DTYPES`, with no block open.

        `TokenColumns` says which may be shorter or missing. The record keeps the arrays, so the caller must not write
        to them. `specs` declare the other arrays. Nothing is checked, the places of pictures neither.
        """
        trajectory = cls(())
        trajectory.num_prompt_tokens = num_prompt_tokens
        trajectory._columns, trajectory._segments = TokenColumns(columns, specs), segments
        trajectory._pictures = pictures
        trajectory._num_blocks = 1 + max([s.block for s in segments], default=-1)
        # Nothing is left open, so the next token sees every token before it. Without blocks, positions count tokens.
        positions = columns.get("position_ids")
        trajectory._next_position = len(trajectory) if positions is None else 1 + int(positions.max(initial=-1))
        return trajectory

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], Trajectory], tuple[dict[str, Any]]]:
        """Pickle without spare memory."""
        return Trajectory.from_dict, (self.to_dict(),)


_OWN: Final = ("token_ids", "logprobs", "weight_versions")
"""Columns of an open path that do not follow from its segments and its place."""


def _plain(segments: Sequence[Segment], num_tokens: int) -> list[list[int]]:
    return [[int(s.origin), s.start, s.stop, s.block, s.path] for s in segments if s.start < num_tokens]
