"""The records of one episode: opening, branching, closing and describing them, and the room that each has left."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, evolve, field

from turnwise.episode.setup import Limits
from turnwise.errors import BudgetExhausted, DataError, TrajectoryError
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.columns import TokenRecord
from turnwise.record.limit import ENGINE_CONTEXT, PICTURES, RECORDS, RESPONSE, Room
from turnwise.record.lineage import EpisodeRecord, RecordLineage
from turnwise.record.open_columns import find_spec
from turnwise.record.outside_call import OutsideCall
from turnwise.record.step_results import Counters, TurnPosition
from turnwise.record.trajectory import Mark, Path, Trajectory
from turnwise.report import MAX_REPORTS, Report
from turnwise.types import MediaTokens, Score, TokenArray


@define(eq=False)
class EpisodeRecords:
    """
    The records of one episode, in the order in which they were opened.

    Attributes:
        limits: of the episode.
        max_context: most tokens of a context of the engine; None when unknown.
        entries: the records.
        outside_calls: calls to other models, which are in no record.
        reports: texts for people, at most `MAX_REPORTS`.
    """

    limits: Limits = field(factory=Limits)
    max_context: int | None = None
    entries: list[EpisodeRecord] = field(factory=list)
    outside_calls: list[OutsideCall] = field(factory=list)
    reports: list[Report] = field(factory=list)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [entry.trajectory for entry in self.entries]

    def add_report(self, report: Report | None, counters: Counters) -> None:
        """Keep a report, if there is one, with its place; count it if there are too many."""
        if report is None:
            return
        if len(self.reports) < MAX_REPORTS:
            self.reports.append(report.placed(len(counters.turn_records)))
        else:
            counters.add_extra("reports_left_out", 1)

    @property
    def last(self) -> Trajectory:
        """The record that was opened last; `TrajectoryError` when there is none."""
        if not self.entries:
            raise TrajectoryError("the episode has no record yet: call begin(prompt_ids) first")
        return self.entries[-1].trajectory

    @property
    def max_tokens(self) -> int:
        """Most tokens that a record can have."""
        limit = self.limits.prompt_length + self.limits.response_length
        return limit if self.max_context is None else min(limit, self.max_context)

    @property
    def lineage(self) -> tuple[RecordLineage, ...]:
        """The lineage of each record; empty without a described or branched one."""
        if all(entry.lineage is None for entry in self.entries):
            return ()
        return tuple(entry.lineage or RecordLineage() for entry in self.entries)

    def open(self, trajectory: Trajectory, seed_name: str, lineage: RecordLineage | None = None) -> Trajectory:
        """
        Add a record.

        Raises:
            BudgetExhausted: the episode has as many as it may have.
            DataError: the prompt has more pictures than a record may have.
        """
        if len(self.entries) >= self.limits.max_records:
            text = f"the episode has {len(self.entries)} records, and max_records allows no more"
            raise BudgetExhausted(text, limit=RECORDS, value=self.limits.max_records)
        if (num_pictures := len(trajectory.pictures)) > self.limits.max_pictures:
            text = f"the prompt has {num_pictures} pictures, more than {PICTURES}={self.limits.max_pictures}"
            raise DataError(text)
        # Equal names must not give equal seeds: two conversations with one prompt would be sampled alike.
        same = sum(entry.seed_name.partition("\0")[0] == seed_name for entry in self.entries) if seed_name else 0
        self.entries.append(EpisodeRecord(trajectory, f"{seed_name}\0{same}" if same else seed_name, lineage))
        return trajectory

    def find_seed_name(self, number: int) -> str | int:
        """Return the seed name of a record; for one without, its number from 1 among all records without."""
        # Named records do not count: their order of opening may differ from run to run.
        return self.entries[number].seed_name or sum(not entry.seed_name for entry in self.entries[: number + 1])

    def branch(self, record: Trajectory, mark: Mark, seed_name: str) -> Trajectory:
        """Add a copy of a record up to a mark, whose sampled tokens are replayed."""
        lineage = RecordLineage(parent=self.find(record), num_shared_tokens=mark.num_tokens)
        return self.open(record.branched(mark), seed_name, lineage)

    def describe(self, record: Trajectory, *, kind: str, label: str, parent: Trajectory | None, trained: bool) -> None:
        """Set the lineage of a record; `TrajectoryError` when it was branched from another parent."""
        number = self.find(record)
        lineage = self.entries[number].lineage or RecordLineage()
        if parent is not None:
            found = self.find(parent)
            if found == number or (lineage.num_shared_tokens and found != lineage.parent):
                raise TrajectoryError(f"record {found} cannot be the parent of record {number}")
            lineage = evolve(lineage, parent=found)
        self.entries[number].lineage = evolve(lineage, kind=kind, label=label, trained=trained)

    def take_columns(self, scores: tuple[Score, ...], specs: Mapping[str, ColumnSpec]) -> tuple[Score, ...]:
        """
        Put the columns of scores into the records, one score for each, and return the scores without them.

        Raises:
            TrajectoryError: no plugin declares a column, or its values do not fit their record.
        """
        if not any(score.columns for score in scores):
            return scores
        filled = self.trajectories
        for number, score in enumerate(scores):
            for name, values in (score.columns or {}).items():
                filled[number] = filled[number].with_column(find_spec(name, specs, "the reward"), values)
            filled[number].close()
        for entry, trajectory in zip(self.entries, filled, strict=True):
            entry.trajectory = trajectory
        return tuple(evolve(score, columns=None) for score in scores)

    def find(self, record: TokenRecord) -> int:
        """Return the number of a record, or of the record that a path belongs to; `TrajectoryError` when foreign."""
        trajectory = record.trajectory if isinstance(record, Path) else record
        for number in reversed(range(len(self.entries))):  # most often the last one
            if self.entries[number].trajectory is trajectory:
                return number
        if not isinstance(record, Trajectory | Path):
            raise TypeError(f"expected a trajectory or one of its paths as record, got {record!r}")
        raise TrajectoryError("the record belongs to another episode: begin and branch open those of this one")

    def resolve(self, record: TokenRecord | None) -> Trajectory | Path:
        """Return a record or path of this episode, the last record when None."""
        if record is None:
            return self.last
        trajectory = self.entries[self.find(record)].trajectory
        return record if isinstance(record, Path) else trajectory

    def locate_turn(self, record: Trajectory | Path) -> TurnPosition:
        """Return the start of the next turn of a record."""
        number = self.find(record)
        num_tokens = len(self.entries[number].trajectory)
        if isinstance(record, Path):
            return (number + 1, num_tokens, record.index, len(record))
        return (number + 1, num_tokens, -1, num_tokens)

    def remaining(self, record: TokenRecord) -> int:
        """Return the response tokens that still fit in a record; open paths count."""
        trajectory = self.entries[self.find(record)].trajectory
        num_tokens = len(trajectory)
        if trajectory.open_paths:  # they count before they are joined: all of their tokens become part of the record
            num_tokens += sum(map(len, trajectory.open_paths))
        limit = trajectory.num_prompt_tokens + self.limits.response_length
        if self.max_context is not None:
            limit = min(limit, self.max_context)
        return max(0, limit - num_tokens)

    def check_room(
        self, record: Trajectory | Path, noun: str, tokens: TokenArray | MediaTokens, spare: int = 0
    ) -> None:
        """Raise `BudgetExhausted` unless tokens, their pictures and `spare` tokens of the model fit into a record."""
        num_tokens, limit = len(tokens), self.limits.max_pictures
        if isinstance(tokens, MediaTokens) and (num := len(record.pictures) + len(tokens.pictures)) > limit:
            text = f"the {noun} would give the record {num} pictures, more than {limit}"
            raise BudgetExhausted(text, limit=PICTURES, value=limit)
        if num_tokens + spare > self.remaining(record):
            room = self.find_room(record)
            fits = "did not fit into" if num_tokens > room.num_tokens else "filled"
            text = f"the {noun} of {num_tokens} tokens {fits} the {room.num_tokens} that were left"
            raise BudgetExhausted(text, limit=room.limit, value=room.value)

    def find_room(self, record: TokenRecord) -> Room:
        """Return `remaining` with the limit that it counts up to."""
        num_prompt, response = self.entries[self.find(record)].trajectory.num_prompt_tokens, self.limits.response_length
        left = self.remaining(record)
        if self.max_context is not None and self.max_context < num_prompt + response:
            return Room(left, ENGINE_CONTEXT, self.max_context)
        return Room(left, RESPONSE, response)
