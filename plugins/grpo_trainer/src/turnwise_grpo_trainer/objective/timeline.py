"""
The order in time of an episode's tokens, for the estimators with time steps.

Shapes: B rows; R response columns; L lines of S steps.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from turnwise import RolloutBatch


@frozen(eq=False)
class Timeline:
    """
    The response tokens of an episode's rows in one line, in the order of the rows: L lines of S steps.

    `RolloutBatch.line_index` numbers the lines: each row that was expanded from parallel paths is one.

    Attributes:
        real: (B, R) bool, 1 on the N response tokens.
        line_of: (B,) int64, the line of each row.
        lines: (N,) int64, the line of each token.
        steps: (N,) int64, the place of each token in its line.
    """

    real: Tensor
    line_of: Tensor
    lines: Tensor
    steps: Tensor

    @classmethod
    def from_batch(cls, batch: RolloutBatch) -> Timeline:
        """Build the lines of a batch."""
        line_of = batch.line_index
        real = batch.attention_mask[:, batch.prompt_length :].bool()
        lines = line_of[:, None].expand_as(real)[real]
        # The tokens line by line; a stable sort keeps their order within each line.
        counts = torch.bincount(lines, minlength=len(batch))
        order = lines.argsort(stable=True)
        steps = torch.empty_like(lines)
        steps[order] = torch.arange(len(lines)) - (counts.cumsum(0) - counts)[lines[order]]
        return cls(real, line_of, lines, steps)

    def join(self, values: Tensor) -> Tensor:
        """Return (L, S) the values of (B, R) response columns, 0 after the end of a line."""
        num_lines, num_steps = (int(each.max()) + 1 if len(each) else 0 for each in (self.line_of, self.steps))
        joined = values.new_zeros(num_lines, num_steps)
        joined[self.lines, self.steps] = values[self.real]
        return joined

    def split(self, values: Tensor) -> Tensor:
        """Return (B, R) the values of (L, S) steps, 0 on pads; the inverse of `join`."""
        parts = values.new_zeros(self.real.shape)
        parts[self.real] = values[self.lines, self.steps]
        return parts
