"""Mini-batches: the rows of one optimizer step, and shares of them whose gradients are measured."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from turnwise import RolloutBatch
from turnwise_grpo_trainer.rows import TokenRows


@frozen(eq=False)
class Share:
    """
    A share of a mini-batch.

    Attributes:
        rows: their numbers in the mini-batch.
        num_groups: their size in groups, with a fraction if a part of a group belongs to the share.
    """

    rows: Sequence[int]
    num_groups: float


@frozen(eq=False)
class MiniBatch:
    """
    The rows of one optimizer step.

    Attributes:
        rows: of whole episodes.
        shares: the rows in one share or, if the batch has only this mini-batch, in two.
    """

    rows: TokenRows
    shares: Sequence[Share]

    @property
    def num_groups(self) -> float:
        """Size in groups."""
        return sum(share.num_groups for share in self.shares)


def split_batch(rows: TokenRows, batch: RolloutBatch, size: int | None) -> list[MiniBatch]:
    """
    Return the mini-batches of an epoch, each of `size` whole episodes.

    Without a size, or if all episodes fit, there is one. Its gradient cannot be compared with those of other
    mini-batches, so it has two shares with half of the groups each.
    """
    episodes, groups = batch.episode_index, batch.group_index
    total = int(episodes.max()) + 1 if len(batch) else 0
    num_groups = int(groups.max()) + 1 if len(batch) else 0
    if size is None or size >= total:
        late = groups * 2 >= num_groups
        num_late = num_groups // 2
        halves = [Share(torch.nonzero(~late).flatten().tolist(), num_groups - num_late)]
        if num_late:
            halves.append(Share(torch.nonzero(late).flatten().tolist(), num_late))
        return [MiniBatch(rows, halves)]
    found = []
    for start in range(0, total, size):
        chosen = torch.nonzero((start <= episodes) & (episodes < start + size)).flatten().tolist()
        share = num_groups * (min(start + size, total) - start) / total
        found.append(MiniBatch(rows.select(chosen), [Share(range(len(chosen)), share)]))
    return found
