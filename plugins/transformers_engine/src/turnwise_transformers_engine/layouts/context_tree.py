"""
Maps contexts to cache slots: a tree over tokens, with joins.

A node is a token together with the context that it attends to, so requests with the same prefix share its keys and
values. The paths of a block are branches of one node. A join is a node without a token, below all paths of a block.
There are no tensors here: a slot is a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from turnwise.layout import Layout

ROOT = 0
"""The empty context."""

TRASH = 0
"""A slot that is never read; padding is written to it."""

_Key = tuple[int, int] | tuple[int, ...]


@define(eq=False)
class Node:
    """
    A token in its context, or a join.

    Attributes:
        number: unique and increasing.
        key: lookup key: parent and token, or -1 and the ends of all paths.
        slot: slot of its keys and values; -1 for a join.
        pins: number of rows that use it.
        used: time of its last release.
    """

    number: int
    key: _Key
    slot: int
    pins: int = 0
    used: int = 0


@define(eq=False)
class Placement:
    """
    A context in the tree.

    Attributes:
        nodes: nodes of its tokens and joins, pinned until `ContextTree.release`.
        slots: (n,) slots of its tokens.
        missing: (m,) indices of the tokens without keys and values.
        end: number of the node that the next token follows.
    """

    nodes: list[Node]
    slots: NDArray[np.int64]
    missing: NDArray[np.int64]
    end: int


@define(eq=False)
class ContextTree:
    """
    Assigns slots to tokens. Contexts share the slots of a common prefix, and the least recently used are evicted.

    Attributes:
        capacity: number of slots, without `TRASH`.
    """

    capacity: int
    _nodes: dict[_Key, Node] = field(factory=dict, init=False)
    _free: list[int] = field(factory=list, init=False)
    _num_slots: int = field(default=0, init=False)
    _num_pinned: int = field(default=0, init=False)
    _count: int = field(default=ROOT, init=False)
    _clock: int = field(default=0, init=False)

    @property
    def num_slots(self) -> int:
        """The highest slot that was ever assigned."""
        return self._num_slots

    @property
    def num_pinned(self) -> int:
        """Number of slots that are in use and cannot be evicted."""
        return self._num_pinned

    def num_needed(self, token_ids: Sequence[int], layout: Layout) -> int:
        """Return the number of additional slots that a context would pin, without pinning them."""
        walk = _Walk(layout)
        needed = 0
        for index, token in enumerate(token_ids):
            key = walk.key(index, token)
            node = self._nodes.get(key) if walk.known else None
            needed += node is None or not node.pins
            walk.follow(index, node.number if node else None)
            if walk.join_due(index + 1):
                joined = self._nodes.get(walk.join_key())
                walk.follow_join(joined.number if joined else None)
        return needed

    def place(self, token_ids: Sequence[int], layout: Layout) -> Placement:
        """Assign slots to a context and pin it."""
        walk, placement = _Walk(layout), Placement([], np.empty(len(token_ids), np.int64), np.empty(0, np.int64), ROOT)
        missing = []
        for index, token in enumerate(token_ids):
            key = walk.key(index, token)
            if key not in self._nodes:
                missing.append(index)
            node = self._pin(key)
            placement.nodes.append(node)
            placement.slots[index] = node.slot
            walk.follow(index, node.number)
            if walk.join_due(index + 1):
                joined = self._pin(walk.join_key(), is_join=True)
                placement.nodes.append(joined)
                walk.follow_join(joined.number)
        placement.missing, placement.end = np.array(missing, np.int64), walk.end
        return placement

    def extend(self, placement: Placement, token: int) -> int:
        """Append a token to a placed context, pin it, and return its slot. `slots` and `missing` do not change."""
        node = self._pin((placement.end, token))
        placement.nodes.append(node)
        placement.end = node.number
        return node.slot

    def release(self, placement: Placement) -> None:
        """Unpin a context. Its slots can be reused until they are evicted."""
        self._clock += 1
        for node in placement.nodes:
            node.pins -= 1
            node.used = self._clock
            self._num_pinned -= not node.pins and node.slot >= 0
        placement.nodes.clear()

    def clear(self) -> None:
        """Forget every context. Placed contexts must be placed again."""
        self._nodes.clear()
        self._free.clear()
        self._num_slots = self._num_pinned = 0

    def _pin(self, key: _Key, *, is_join: bool = False) -> Node:
        node = self._nodes.get(key)
        if node is None:
            self._count += 1
            node = self._nodes[key] = Node(self._count, key, -1 if is_join else self._assign_slot())
        self._num_pinned += not node.pins and node.slot >= 0
        node.pins += 1
        return node

    def _assign_slot(self) -> int:
        if not self._free and self._num_slots >= self.capacity:
            self._evict()
        if self._free:
            return self._free.pop()
        self._num_slots += 1
        return self._num_slots

    def _evict(self) -> None:
        """Free a quarter of the unpinned slots: least recently used first, and of equal age the last token first."""
        unpinned = sorted((n for n in self._nodes.values() if not n.pins), key=lambda n: (n.used, -n.number))
        wanted = max(1, sum(n.slot >= 0 for n in unpinned) // 4)
        for node in unpinned:
            del self._nodes[node.key]
            if node.slot >= 0:
                self._free.append(node.slot)
                wanted -= 1
            if not wanted:
                return
        raise RuntimeError(f"all {self.capacity} slots of the layout cache are in use")


class _Walk:
    """The current node while a context is traversed."""

    def __init__(self, layout: Layout) -> None:
        self._starts = {start: block for block, start, _stop in layout.paths}
        self._stops = {stop for _block, _start, stop in layout.paths}
        self._fork: int | None = ROOT
        self._last: int | None = ROOT
        self._ends: list[int | None] = []
        self._inside = False

    @property
    def known(self) -> bool:
        """Whether the node that the next token follows is in the tree."""
        return self._last is not None

    @property
    def end(self) -> int:
        """The node that the next token follows."""
        return ROOT if self._last is None else self._last

    def key(self, index: int, token: int) -> _Key:
        """Return the key of the token at an index."""
        if index in self._starts:
            if self._starts[index] == index:
                self._fork = self._last
            self._inside, self._last = True, self._fork
        return (self.end, token)

    def follow(self, index: int, number: int | None) -> None:
        """Move to the token's node; None if the tree does not have it."""
        self._last = number
        if self._inside and index + 1 in self._stops:
            self._ends.append(number)
            self._inside = False

    def join_due(self, index: int) -> bool:
        """Return whether a block ends before this index."""
        ended = bool(self._ends) and not self._inside
        return ended and (index not in self._starts or self._starts[index] == index)

    def join_key(self) -> _Key:
        """Return the key of the join of the ended paths."""
        return (-1, *(-1 if end is None else end for end in self._ends))

    def follow_join(self, number: int | None) -> None:
        """Move to the join, after the block."""
        self._last, self._ends = number, []
