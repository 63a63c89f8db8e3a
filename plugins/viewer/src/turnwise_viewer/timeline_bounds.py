"""
Bounds the timeline that a page gets and draws: a long run has more slices than a screen has pixels.

`web/src/bounds.ts` does the same for an exported page, which has no server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from turnwise.types import JsonDict
from turnwise_viewer.trace_slices import CATEGORIES

MOST_SLICES: Final = 6000
MOST_ROWS: Final = 200
_PIXELS: Final = 1000
"""Width of a row in the page; no block is narrower than a pixel."""

_Slice = list[Any]
"""Start, seconds, category, name, key; a block of several slices has their number as well."""


def bound(timeline: dict[str, Any]) -> JsonDict:
    """
    Return a timeline with at most `MOST_SLICES` slices in at most `MOST_ROWS` rows, and three further values.

    `longest` is the slice of the longest episode, null if there is none. `num_merged` counts the slices that are in
    blocks. A block replaces short neighbours of one category and row. It has their number as a sixth element, and a key
    if all are of one episode. `num_hidden_rows` counts the rows that are left out: of each worker and replica, the ones
    whose longest slice is shortest.
    """
    episodes = [each for row in timeline["rows"] for each in row["slices"] if each[2] == "episode"]
    longest = max(episodes, key=lambda each: each[1], default=None)
    rows = _choose_rows(timeline["rows"])
    slices: list[list[_Slice]] = [row["slices"] for row in rows]
    width = timeline["seconds"] / _PIXELS or 1.0
    while sum(map(len, slices)) > MOST_SLICES:
        slices = [_merge(row, width, longest) for row in slices]
        width *= 2
    return timeline | {
        "rows": [row | {"slices": each} for row, each in zip(rows, slices, strict=True)],
        "longest": longest,
        "num_merged": sum(each[5] for row in slices for each in row if len(each) > 5),
        "num_hidden_rows": len(timeline["rows"]) - len(rows),
    }


def _choose_rows(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the rows to show, in order: of each worker and replica, the ones with the longest slices."""
    if len(rows) <= MOST_ROWS:
        return rows
    ranks: Counter[str] = Counter()
    lengths = [max((each[1] for each in row["slices"]), default=0.0) for row in rows]
    ranked = []
    for number in sorted(range(len(rows)), key=lambda number: -lengths[number]):
        name = rows[number]["name"]
        ranked.append((ranks[name], number))
        ranks[name] += 1
    # The sort is stable, so rows of one rank stay in the order of their longest slices.
    ranked.sort(key=lambda each: each[0])
    return [rows[number] for number in sorted(number for _rank, number in ranked[:MOST_ROWS])]


def _merge(row: Sequence[_Slice], width: float, longest: _Slice | None) -> list[_Slice]:
    """Return a row whose slices shorter than `width` seconds are merged with their neighbours of one category."""
    kept: list[_Slice] = []
    blocks: dict[tuple[str, int], _Slice] = {}
    for each in row:
        place = each[2], int(each[0] // width)
        if each is longest or each[1] >= width:
            kept.append(each)
        elif place in blocks:
            blocks[place] = _join(blocks[place], each)
        else:
            blocks[place] = each
    # Later slices are drawn above earlier ones, and a block of episodes may start after a block of their tools.
    return sorted([*kept, *blocks.values()], key=lambda each: (CATEGORIES.index(each[2]), each[0]))


def _join(one: _Slice, other: _Slice) -> _Slice:
    start, end = min(one[0], other[0]), max(one[0] + one[1], other[0] + other[1])
    count = sum(each[5] if len(each) > 5 else 1 for each in (one, other))
    key = one[4] if one[4] == other[4] else None
    return [start, end - start, one[2], f"{count} {one[2]} slices", key, count]
