"""Print the picture of `docs/explanation/shared-prefixes.md`: a tree in one line, and which token sees which."""

from __future__ import annotations

import sys
from collections.abc import Sequence

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


if __name__ == "__main__":
    sys.stdout.write(draw() + "\n")
