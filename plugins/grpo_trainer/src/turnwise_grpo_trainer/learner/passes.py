"""
The forward passes of an update: which rows each process computes together, as forests or as separate rows.

All processes have the whole batch and make the same plan, so no process asks another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from attrs import frozen

from turnwise_grpo_trainer.learner.micro_batches import MicroBatch, collate, pack_by_tokens, shard
from turnwise_grpo_trainer.learner.prefix_forests import SortedRows, collate_forest, sort_rows
from turnwise_grpo_trainer.objective.rows import TokenRows

_GAIN: Final = 0.95
"""Forests are used if they cost at most this share of separate rows: what they save must pay for sorting, too."""
_PASS_TOKENS: Final = 32
"""The cost of a further forward pass, in tokens."""


@frozen
class Sharing:
    """
    What a forest costs a model, in units of a token without its attention.

    Attributes:
        pair_cost: of a query and a key.
        is_dense: whether attention computes all pairs of a forest, and not the visible ones only.
        window: most tokens of a row, of a model with sliding windows; None without.
    """

    pair_cost: float
    is_dense: bool
    window: int | None = None

    def joins(self, size: int, shared: int, new: int) -> bool:
        """Return whether a row of `shared + new` tokens costs less in a forest of `size` tokens than in the next."""
        if not self.is_dense:
            return True
        further = (size + new) ** 2 - size**2 - (shared + new) ** 2
        return self.pair_cost * further <= shared + _PASS_TOKENS


@frozen
class Pass:
    """
    A micro-batch.

    Attributes:
        rows: indices of its rows.
        num_tokens: that the model computes, pads too.
        num_pairs: of queries and keys that the attention computes, about.
        is_forest: whether shared prefixes are computed once.
    """

    rows: Sequence[int]
    num_tokens: int
    num_pairs: float
    is_forest: bool = False


@frozen
class PassPlan:
    """
    Micro-batches of some rows.

    Attributes:
        shares: the passes of each process.
        row_tokens: tokens of the rows.
    """

    shares: Sequence[Sequence[Pass]]
    row_tokens: int

    @property
    def forwarded_tokens(self) -> int:
        """Tokens that all processes compute, pads too, without repeated micro-batches that count nothing."""
        return sum(each.num_tokens for share in self.shares for each in share)

    def cost(self, sharing: Sharing) -> float:
        """Return the cost of the process with most work, in tokens."""
        return max(
            sum(each.num_tokens + _PASS_TOKENS + sharing.pair_cost * each.num_pairs for each in share)
            for share in self.shares
        )


@frozen
class Packing:
    """
    How rows become micro-batches.

    Attributes:
        max_tokens: most tokens of a micro-batch, including pads; a longer row is alone.
        packed: whether separate rows are concatenated, or padded.
        sharing: costs of forests; None if the model cannot compute them, or shall not.
    """

    max_tokens: int
    packed: bool
    sharing: Sharing | None = None

    def plan(self, rows: TokenRows, num_shards: int, chosen: Sequence[int] | None = None) -> PassPlan:
        """Plan the passes of the chosen rows, or of all, for some processes: as forests where these cost less."""
        shares = shard(rows, num_shards, chosen)
        row_tokens = sum(rows.lengths[row] for share in shares for row in share)
        separate = PassPlan([self._separate(rows, share) for share in shares], row_tokens)
        if self.sharing is None or row_tokens == 0:
            return separate
        merged = sorted(row for share in shares for row in share)
        if self.sharing.window is not None and max(rows.lengths[row] for row in merged) > self.sharing.window:
            return separate
        found = sort_rows(rows, merged)
        if found.num_shared == 0:
            return separate
        forests = PassPlan(self._forests(rows, found, self.sharing, num_shards), row_tokens)
        return forests if forests.cost(self.sharing) < _GAIN * separate.cost(self.sharing) else separate

    def collate(self, rows: TokenRows, each: Pass | None) -> MicroBatch:
        """Return the micro-batch of a pass; None is one without rows."""
        if each is not None and each.is_forest:
            return collate_forest(rows, each.rows)
        return collate(rows, each.rows if each is not None else (), packed=self.packed)

    def micro_batches(self, rows: TokenRows, plan: PassPlan, rank: int) -> Iterator[tuple[MicroBatch, bool]]:
        """
        Yield a process's micro-batches of a plan, and whether each counts.

        Forward and backward passes of a sharded model are collective, so every process must make equally many. A
        process with fewer micro-batches repeats one with weight 0.
        """
        own = plan.shares[rank]
        filler = plan.shares[0][-1] if plan.shares[0] else None
        for number in range(max(map(len, plan.shares))):
            counts = number < len(own)
            yield self.collate(rows, own[number] if counts else filler), counts

    def _separate(self, rows: TokenRows, share: Sequence[int]) -> list[Pass]:
        passes = []
        for group in pack_by_tokens(rows, share, max_tokens=self.max_tokens, packed=self.packed):
            lengths = [rows.lengths[row] for row in group]
            if self.packed:
                passes.append(Pass(group, sum(lengths), float(sum(lengths) ** 2)))
            else:
                passes.append(Pass(group, max(lengths) * len(group), max(lengths) ** 2 * len(group) / 2))
        return passes

    def _forests(self, rows: TokenRows, found: SortedRows, sharing: Sharing, num_shards: int) -> list[list[Pass]]:
        """Return forests, in the order of size dealt to the processes."""
        lengths = [rows.lengths[row] for row in found.order]
        total = sum(lengths) - found.num_shared
        budget = min(self.max_tokens, max(-(-total // num_shards), *lengths))
        groups: list[tuple[list[int], int, float]] = []
        for row, length, shared in zip(found.order, lengths, found.shared, strict=True):
            own, size, pairs = groups[-1] if groups else ([], budget, 0.0)
            new = length - shared
            if size + new > budget or not sharing.joins(size, shared, new):
                own, size, pairs, shared, new = [], 0, 0.0, 0, length
                groups.append((own, size, pairs))
            own.append(row)
            visible = pairs + (length * (length + 1) - shared * (shared + 1)) / 2
            groups[-1] = own, size + new, visible
        passes = [
            Pass(own, size, float(size**2) if sharing.is_dense else pairs, is_forest=True)
            for own, size, pairs in groups
        ]
        passes.sort(key=lambda each: (-each.num_tokens, each.rows[0]))
        return [passes[number::num_shards] for number in range(num_shards)]
