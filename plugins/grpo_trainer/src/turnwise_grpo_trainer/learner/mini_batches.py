"""Mini-batches: the rows of one optimizer step, and shares of them whose gradients are measured."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from turnwise import RolloutBatch
from turnwise_grpo_trainer.objective.rows import TokenRows


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
        shares: the rows in two shares, each with half of the groups; in one if there is only one group.
    """

    rows: TokenRows
    shares: Sequence[Share]

    @property
    def num_groups(self) -> float:
        """Size in groups."""
        return sum(share.num_groups for share in self.shares)


def split_batch(rows: TokenRows, batch: RolloutBatch, size: int | None) -> list[MiniBatch]:
    """Return the mini-batches of an epoch, each of `size` whole episodes; None is the whole batch."""
    episodes, groups = batch.episode_index, batch.group_index
    total = int(episodes.max()) + 1 if len(batch) else 0
    groups_per_episode = (int(groups.max()) + 1) / total if total else 0.0
    found = []
    for start in range(0, max(total, 1), size or max(total, 1)):
        chosen = torch.nonzero((start <= episodes) & (episodes < start + (size or total))).flatten()
        order = torch.unique(groups[chosen])
        late = torch.isin(groups[chosen], order[(len(order) + 1) // 2 :])
        shares = [
            Share(
                torch.nonzero(half).flatten().tolist(), len(torch.unique(episodes[chosen[half]])) * groups_per_episode
            )
            for half in (~late, late)
            if half.any()
        ]
        found.append(MiniBatch(rows.select(chosen.tolist()), shares))
    return found
