"""A cache whose bound is the size of its values, such as the bytes of pictures, and not their number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from attrs import define, field

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@define(eq=False)
class SizedCache(Generic[K, V]):
    """
    Keeps the values that were used last. Threads may not share it without a lock.

    Attributes:
        max_size: most of the sizes of all values together, in any unit.
        size: of all values now.
    """

    max_size: int
    size: int = field(default=0, init=False)
    _entries: OrderedDict[K, tuple[V, int]] = field(factory=OrderedDict, init=False)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return a value, which is then the one used last; None if it is not here."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: K, value: V, size: int) -> list[K]:
        """Keep a value as the one used last; return the keys that it removes, its own too if it alone is too large."""
        self.size += size - self._entries.get(key, (None, 0))[1]
        self._entries[key] = value, size
        self._entries.move_to_end(key)
        removed = []
        while self.size > self.max_size:
            oldest, (_value, freed) = self._entries.popitem(last=False)
            self.size -= freed
            removed.append(oldest)
        return removed
