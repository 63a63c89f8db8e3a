"""Keys and values of running requests of similar length, each in consecutive memory."""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

_FIRST_ROWS = 8


@define(eq=False)
class Slab:
    """
    Rows of equal capacity. The rows in use are always the first ones.

    Attributes:
        length: most tokens of a row.
        data: (layers, S, 2, length, G, D), keys before values; S grows as rows are added.
    """

    length: int
    data: Tensor
    _first_slots: Tensor = field(init=False)
    _steps: Tensor = field(init=False)

    @staticmethod
    def make(length: int, num_layers: int, num_groups: int, depth: int, device: torch.device) -> Slab:
        """Return an empty slab."""
        # Zeros: hidden keys are multiplied by a probability of zero, and uninitialised memory could be NaN.
        return Slab(length, torch.zeros(num_layers, _FIRST_ROWS, 2, length, num_groups, depth, device=device))

    def __attrs_post_init__(self) -> None:
        self._make_tables()

    @property
    def num_rows(self) -> int:
        """Rows that fit."""
        return self.data.shape[1]

    def reserve(self, num_rows: int) -> None:
        """Grow to at least this number of rows."""
        old = self.data
        if num_rows > self.num_rows:
            self.data = old.new_zeros(len(old), max(num_rows, 2 * self.num_rows), *old.shape[2:])
            self.data[:, : old.shape[1]] = old
            self._make_tables()

    def _make_tables(self) -> None:
        device = self.data.device
        self._first_slots = torch.arange(0, 2 * self.num_rows * self.length, 2 * self.length, device=device)
        self._steps = torch.arange(self.length, device=device)

    def slots(self, positions: Tensor) -> Tensor:
        """Return (2 * B,) slots of one position of each row, for its keys and then its values."""
        keys = self._first_slots[: len(positions)] + positions
        return torch.stack([keys, keys + self.length], -1).flatten()

    def mask(self, positions: Tensor, length: int) -> Tensor:
        """Return the (B, 1, 1, length) additive mask that hides the positions after one position of each row."""
        hidden = self._steps[:length] > positions[:, None]
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of a row into another row."""
        self.data[:, target, :, :num_tokens] = self.data[:, source, :, :num_tokens]
