"""Keys and values of finished contexts in pages, to be copied into rows that continue the same prefix."""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

_ROOT = -1

PageKey = tuple[int, bytes]
"""The number of the page before, and the ids of the page."""


@define(eq=False)
class PrefixPages:
    """
    A cache of whole pages. A page is known by the page before it and its ids, and the least recently used go first.

    Attributes:
        page_size: tokens of a page.
        data: (layers, 2, pages, page size, G, D), keys before values.
    """

    page_size: int
    data: Tensor
    _pages: OrderedDict[PageKey, tuple[int, int]] = field(factory=OrderedDict, init=False)
    _free: list[int] = field(init=False)
    _count: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        # Pages in sequence for contexts in sequence.
        self._free = list(reversed(range(self.data.shape[2])))

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, token_ids: Sequence[int]) -> tuple[list[int], PageKey | None]:
        """
        Return the pages of the longest known prefix, and the key of the page that would follow.

        The last id is never part of it, because it has to run. The key is None if no whole page is left.
        """
        found: list[int] = []
        keys: list[PageKey] = []
        for key in self._keys(token_ids[:-1]):
            if key not in self._pages:
                self._touch(keys)
                return found, key
            found.append(self._pages[key][1])
            keys.append(key)
        self._touch(keys)
        return found, None

    def load(self, pages: Sequence[int], row: Tensor) -> int:
        """Copy pages to the start of a row, (layers, 2, L, G, D), and return their number of tokens."""
        num_tokens = len(pages) * self.page_size
        if pages:
            row[:, :, :num_tokens] = self.data[:, :, torch.tensor(pages, device=self.data.device)].flatten(2, 3)
        return num_tokens

    def store(self, token_ids: Sequence[int], row: Tensor, most_pages: int) -> None:
        """Copy the whole pages of a row, (layers, 2, L, G, D), that are not known; keep at most `most_pages` in all."""
        keys: list[PageKey] = []
        missing: list[int] = []
        for key in self._keys(token_ids):
            if key not in self._pages:
                self.limit(min(most_pages, self.data.shape[2]) - 1)
                if not self._free or most_pages < 1 or (keys and keys[-1] not in self._pages):
                    break
                missing.append(self._free.pop())
                self._count += 1
                self._pages[key] = self._count, missing[-1]
            keys.append(key)
        self._touch(key for key in keys if key in self._pages)
        if missing:
            first = (len(keys) - len(missing)) * self.page_size
            new = row[:, :, first : first + len(missing) * self.page_size]
            new = new.reshape(*new.shape[:2], len(missing), self.page_size, *new.shape[3:])
            if missing == list(range(missing[0], missing[0] + len(missing))):
                self.data[:, :, missing[0] : missing[0] + len(missing)] = new  # faster than the copy by index
            else:
                self.data.index_copy_(2, torch.tensor(missing, device=self.data.device), new)

    def limit(self, most_pages: int) -> None:
        """Forget the least recently used pages beyond a number."""
        while len(self._pages) > max(most_pages, 0):
            self._free.append(self._pages.popitem(last=False)[1][1])

    def clear(self) -> None:
        """Forget all pages."""
        self.limit(0)

    def _keys(self, token_ids: Sequence[int]) -> Iterator[PageKey]:
        """Yield the keys of the whole pages. A key needs the number of the page before it, known when it is yielded."""
        ids, parent = np.asarray(token_ids, np.int32), _ROOT
        for start in range(0, len(ids) - self.page_size + 1, self.page_size):
            key = parent, ids[start : start + self.page_size].tobytes()
            yield key
            if key not in self._pages:
                return
            parent = self._pages[key][0]

    def _touch(self, keys: Sequence[PageKey] | Iterator[PageKey]) -> None:
        # Later pages first: a page is useless without those before it, so these must be forgotten last.
        for key in reversed(list(keys)):
            self._pages.move_to_end(key)
