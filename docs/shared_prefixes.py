"""
Draw `docs/explanation/shared-prefixes.md`: a tree in one line, and which token sees which.

    python docs/shared_prefixes.py    print the text of the page, and write docs/images/shared-prefixes.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TREE = [("P", 4, 13), ("A", 2, 6), ("B", 2, 11), ("C", 2, 10), ("D", 1, 11), ("E", 2, 13)]
"""Name of each node, its tokens, and the column at which its subtree ends."""


def draw(nodes: Sequence[tuple[str, int, int]] = TREE) -> str:
    """Return a line for each token: its node, column, end of subtree, and a mark for each token that it sees."""
    names = [name for name, size, _ in nodes for _ in range(size)]
    ends = [end for _, size, end in nodes for _ in range(size)]
    lines = ["query  column  subtree_end  keys " + " ".join(names)]
    for query, (name, end) in enumerate(zip(names, ends, strict=True)):
        seen = ["x" if key <= query < ends[key] else "." for key in range(len(names))]
        lines.append(f"{name:5}  {query:6}  {end:11}       {' '.join(seen)}")
    return "\n".join(lines)


CELL, LEFT, TOP = 22, 330, 70
COLORS = dict(zip("PABCDE", ("#4c78a8", "#f58518", "#54a24b", "#b79a20", "#e45756", "#9d755d"), strict=True))
PARENTS = {"A": "P", "B": "P", "C": "B", "D": "B", "E": "P"}
PLACES = {"P": (20, 190), "A": (125, 90), "B": (125, 190), "E": (125, 290), "C": (230, 140), "D": (230, 240)}


def draw_svg(nodes: Sequence[tuple[str, int, int]] = TREE) -> str:
    """Return a picture: the tree on the left, and on the right its tokens in one line with their mask."""
    names = [name for name, size, _ in nodes for _ in range(size)]
    ends = [end for _, size, end in nodes for _ in range(size)]
    width, height = LEFT + CELL * (len(names) + 1), TOP + CELL * (len(names) + 1)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        ' font-family="sans-serif" font-size="12">'
        "<title>A tree of four rows of a prompt, its tokens in one line, and its mask</title>"
        f'<rect width="{width}" height="{height}" fill="white"/>'
    )
    lines = [head, *_draw_tree(nodes), *_draw_mask(names, ends), "</svg>"]
    return "\n".join(lines) + "\n"


def _draw_tree(nodes: Sequence[tuple[str, int, int]]) -> Iterator[str]:
    yield '<text x="20" y="24" font-weight="bold">the tree of four rows</text>'
    for child, parent in PARENTS.items():
        (x0, y0), (x1, y1) = PLACES[parent], PLACES[child]
        yield f'<line x1="{x0 + 70}" y1="{y0 + 13}" x2="{x1}" y2="{y1 + 13}" stroke="#888"/>'
    for name, size, _ in nodes:
        x, y = PLACES[name]
        yield f'<rect x="{x}" y="{y}" width="70" height="26" rx="4" fill="{COLORS[name]}"/>'
        yield f'<text x="{x + 8}" y="{y + 17}" fill="white">{name}: {size} token{"s"[: size > 1]}</text>'


def _draw_mask(names: Sequence[str], ends: Sequence[int]) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="24" font-weight="bold">one line: the cells of a row are the tokens it sees</text>'
    for place, name in enumerate(names):
        near, far = LEFT + CELL * place, TOP + CELL * place
        yield f'<text x="{near + 6}" y="{TOP - 8}" fill="{COLORS[name]}">{name}</text>'
        yield f'<text x="{LEFT - 16}" y="{far + 15}" fill="{COLORS[name]}">{name}</text>'
    for query in range(len(names)):
        for key, name in enumerate(names):
            color = COLORS[name] if key <= query < ends[key] else "#eeeeee"
            x, y = LEFT + CELL * key, TOP + CELL * query
            yield f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{color}"/>'


if __name__ == "__main__":
    sys.stdout.write(draw() + "\n")
    Path(__file__).with_name("images").joinpath("shared-prefixes.svg").write_text(draw_svg(), encoding="utf-8")
