"""A record of an episode with its samples, and its relation to the other records of the episode."""

from __future__ import annotations

from typing import NamedTuple

from attrs import define, field, frozen

from turnwise.record.trajectory import Mark, Trajectory
from turnwise.types import FinishReason, GenerateResult


@frozen(kw_only=True)
class RecordLineage:
    """
    The relation of a record to the other records of its episode.

    Attributes:
        parent: number of the record that it continues or serves, from 0; None for a conversation without one.
        num_shared_tokens: tokens at its start that it copied from the parent.
        kind: role of the record, such as `main` or `subagent`.
        label: free text for people.
        trained: whether a batch has rows of it.
    """

    parent: int | None = None
    num_shared_tokens: int = 0
    kind: str = "main"
    label: str = ""
    trained: bool = True


class RecordMark(NamedTuple):
    """State of a record at some time."""

    size: Mark
    lineage: RecordLineage | None
    is_open: bool


@define(eq=False)
class EpisodeRecord:
    """
    One of the records of an episode.

    Attributes:
        trajectory: its tokens.
        seed_name: replaces the number of the record in the seeds of its turns; empty for none.
        lineage: None until the record is described or branched.
        is_open: whether it takes further tokens.
        sampled: results of the engine in the order in which they were appended; `check_sampled` compares them.
    """

    trajectory: Trajectory
    seed_name: str = ""
    lineage: RecordLineage | None = None
    is_open: bool = True
    sampled: list[GenerateResult] = field(factory=list)

    def close(self) -> None:
        self.trajectory.close()
        self.is_open = False

    def mark(self) -> RecordMark:
        """Return the current state, for `rewound`; O(open paths)."""
        return RecordMark(self.trajectory.mark(), self.lineage, self.is_open)

    def rewound(self, mark: RecordMark | None = None) -> EpisodeRecord:
        """Return a copy with the state at a mark, or with the current state, and without `sampled`."""
        size, lineage, is_open = mark or self.mark()
        copy = EpisodeRecord(self.trajectory.rewound(size), self.seed_name, lineage)
        if not is_open:
            copy.close()
        return copy

    def find_samples(self) -> list[GenerateResult]:
        """Return the sampled tokens of a restored record, for `sampled`."""
        parts = [(*each.sampled(), each.sampled_columns()) for each in (self.trajectory, *self.trajectory.open_paths)]
        return [
            GenerateResult(token_ids=ids, logprobs=values, finish_reason=FinishReason.STOP, columns=columns)
            for ids, values, columns in parts
        ]
