"""
The records of an episode whose agent loop handles token ids itself.

A loop of verl sends whole contexts to a server, and returns lists of ids and masks at its end. Here each request
continues the record that has the same tokens, so a record holds the tokens that the model read and sampled. The
returned lists are compared with the records: they cannot train a token that the engine did not sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from turnwise import Episode, GenerateResult, SamplingParams, Trajectory
from turnwise.errors import DataError, TrajectoryError
from turnwise.record.columns import Origin, is_sampled
from turnwise.record.trajectory import Mark
from turnwise.types import TokenArray, as_token_array


@frozen
class LoopOutput:
    """
    The lists that a loop returns for one trajectory.

    Attributes:
        prompt_ids: (P,) ids.
        response_ids: (R,) ids.
        response_mask: (R,) 1 on the tokens to train.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]


@define(eq=False)
class LoopRecord:
    """
    A record, and the samples that continue it.

    Attributes:
        record: its tokens.
        marks: places at which it can branch, in order.
        samples: of the record's present end; one is appended when the loop uses it.
        in_flight: whether a request for it has not ended yet.
        claimed: (T,) whether an output trains the token; made at the end of the episode.
    """

    record: Trajectory
    marks: list[Mark] = field(factory=list)
    samples: list[GenerateResult] = field(factory=list)
    in_flight: bool = False
    claimed: NDArray[np.bool_] = field(factory=lambda: np.zeros(0, bool))

    def contexts(self) -> list[tuple[TokenArray, GenerateResult | None]]:
        """Return the record's ids without a sample, and with each of them."""
        ids = self.record.input_ids
        return [(ids, None), *((np.concatenate([ids, each.token_ids]), each) for each in self.samples)]


@define(eq=False)
class LoopRecords:
    """The records of one episode. Requests may run at the same time."""

    episode: Episode
    entries: list[LoopRecord] = field(factory=list)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: Sequence[str] = (),
    ) -> GenerateResult:
        """
        Continue a context.

        Raises:
            DataError: the first context is longer than `rollout.prompt_length`.
            BudgetExhausted, DeadlineExceeded: as in `Episode.sample`.
        """
        entry = self._find(as_token_array(list(prompt_ids)))
        entry.in_flight = True
        try:
            result = await self.episode.sample(sampling, record=entry.record, stop=stop)
        finally:
            entry.in_flight = False
        entry.samples.append(result)
        return result

    def keep_samples(self) -> None:
        """Append the last sample of each record, for an episode that ends without outputs."""
        for entry in self.entries:
            if entry.samples and not entry.in_flight:
                self._append(entry, entry.samples[-1])

    def finish(self, outputs: Sequence[LoopOutput]) -> None:
        """
        Compare the outputs with the records. Records of which no output trains a token are not trained.

        Raises:
            TrajectoryError: an output trains a token that was not sampled, or leaves out one that was; the text names
                the place.
        """
        claims = [self._match(output) for output in outputs]
        for entry in self.entries:
            entry.claimed = np.zeros(len(entry.record), bool)
        for entry, trained in claims:
            self._claim(entry, trained)
        for entry in self.entries:
            is_trained = bool(entry.claimed.any())
            if not is_trained or len(self.entries) > 1:
                self.episode.describe_record(entry.record, trained=is_trained)
            if is_trained:
                _check_complete(entry)

    # Requests

    def _find(self, ids: TokenArray) -> LoopRecord:
        """Return the record that has exactly a context, after it was extended, branched or opened."""
        continued = [
            (len(context), number, sample)
            for number, entry in enumerate(self.entries)
            for context, sample in ([] if entry.in_flight else entry.contexts())
            if _starts_with(ids, context)
        ]
        branched = [
            (mark.num_tokens, number, mark)
            for number, entry in enumerate(self.entries)
            for mark in entry.marks
            if _starts_with(ids, entry.record.input_ids[: mark.num_tokens])
        ]
        longest = max((size for size, _, _ in [*continued, *branched]), default=0)
        for size, number, sample in reversed(continued):
            if size == longest:
                if sample is not None:
                    self._append(self.entries[number], sample)
                    self._drop_equal(ids[:size])
                return self._observe(self.entries[number], ids[size:])
        for size, number, mark in branched:
            if size == longest:
                branch = self._add(self.episode.branch(self.entries[number].record, mark))
                return self._observe(branch, ids[size:])
        record = self.episode.begin(ids)
        if len(record) != len(ids):
            raise DataError(
                f"the loop's prompt has {len(ids)} tokens, but only {len(record)} fit rollout.prompt_length; a loop of"
                " verl shortens its prompts itself, so data.prompt_policy cannot"
            )
        return self._add(record)

    def _add(self, record: Trajectory) -> LoopRecord:
        entry = LoopRecord(record, [record.mark()])
        self.entries.append(entry)
        return entry

    def _append(self, entry: LoopRecord, sample: GenerateResult) -> None:
        self.episode.append(sample, record=entry.record)
        entry.samples = []
        entry.marks.append(entry.record.mark())

    def _drop_equal(self, ids: TokenArray) -> None:
        """Drop the samples of other records by which these would have the same tokens: the loop continues one."""
        for entry in self.entries:
            same = [sample for context, sample in entry.contexts() if np.array_equal(context, ids)]
            entry.samples = [each for each in entry.samples if not any(each is sample for sample in same)]

    def _observe(self, entry: LoopRecord, ids: TokenArray) -> LoopRecord:
        if len(ids):
            self.episode.observe(ids, record=entry.record)
            entry.samples = []
            entry.marks.append(entry.record.mark())
        return entry

    # Outputs

    def _match(self, output: LoopOutput) -> tuple[LoopRecord, NDArray[np.intp]]:
        """Return the record of an output, which ends like the output, and the indices of the tokens to train."""
        if len(output.response_ids) != len(output.response_mask):
            raise TrajectoryError(
                f"response_ids has {len(output.response_ids)} tokens, but response_mask has {len(output.response_mask)}"
            )
        if not self.entries:
            raise TrajectoryError("the loop returned an output, but sent no request to its server_manager")
        num_prompt = len(output.prompt_ids)
        ids = as_token_array([*output.prompt_ids, *output.response_ids])
        mask = np.array([*[0] * num_prompt, *output.response_mask])
        if (wrong := np.flatnonzero((mask != 0) & (mask != 1))).size:
            raise TrajectoryError(f"response_mask[{wrong[0] - num_prompt}] is {mask[wrong[0]]}, expected 0 or 1")
        options = [(entry, context, sample) for entry in self.entries for context, sample in entry.contexts()]
        entry, context, sample = max(options, key=lambda option: _fit(ids, mask, option[1]))
        if sample is not None:
            self._append(entry, sample)
        origins = np.concatenate([np.zeros(entry.record.num_prompt_tokens, np.uint8), entry.record.origins])
        _check_tokens(ids, mask, context, origins, num_prompt)
        # Tokens behind the last turn train nothing: they are kept as far as they fit.
        room = max(0, self.episode.remaining(entry.record) - 1)
        self._observe(entry, ids[len(context) :][:room])
        return entry, np.flatnonzero(mask)

    def _claim(self, entry: LoopRecord, trained: NDArray[np.intp]) -> None:
        """Note the trained tokens of a record; shared ones in the record that it branched from."""
        records = [each.record for each in self.entries]
        for index in trained.tolist():
            owner, place = entry, index - entry.record.num_prompt_tokens
            while owner.record.origins[place] == Origin.REPLAYED:
                number = self.episode.trajectories.index(owner.record)
                parent = self.episode.lineage[number].parent or 0  # only a branch has replayed tokens
                owner = self.entries[records.index(self.episode.trajectories[parent])]
            owner.claimed[index] = True


def _fit(ids: TokenArray, mask: NDArray[np.int_], context: TokenArray) -> tuple[int, int]:
    """Return how well a context fits an output: the tokens that agree, and then how few others it has."""
    same = _common_length(ids, context)
    # A token to train that differs was rather sampled as another one than not at all.
    is_trained = same < len(ids) and mask[same] == 1
    return same, len(context) if is_trained else -len(context)


def _check_tokens(
    ids: TokenArray, mask: NDArray[np.int_], context: TokenArray, origins: NDArray[np.uint8], num_prompt: int
) -> None:
    """Raise `TrajectoryError` for the first token of an output that its record does not have, or did not sample."""
    same = _common_length(ids, context)
    sampled = is_sampled(origins[:same])
    if (wrong := np.flatnonzero((mask[:same] == 1) & ~sampled)).size:
        raise TrajectoryError(
            f"response_mask[{wrong[0] - num_prompt}] is 1, but the engine did not sample the token {ids[wrong[0]]}"
            " there: it was in the prompt_ids of a request"
        )
    if same < min(len(ids), len(context)):
        name, place = ("prompt_ids", same) if same < num_prompt else ("response_ids", same - num_prompt)
        how = "sampled" if Origin(origins[same]).is_sampled else "read"
        raise TrajectoryError(
            f"{name}[{place}] is {ids[same]}, but the model {how} the token {context[same]} there; return the ids of"
            " the requests and of their outputs"
        )
    if (wrong := np.flatnonzero(mask[same:] == 1)).size:
        raise TrajectoryError(
            f"response_mask[{same + wrong[0] - num_prompt}] is 1, but the engine did not sample the token"
            f" {ids[same + wrong[0]]} there: the record has {max(0, len(context) - num_prompt)} response tokens"
        )


def _check_complete(entry: LoopRecord) -> None:
    """Raise `TrajectoryError` for a sampled token of a trained record that no output trains."""
    record = entry.record
    is_action = record.response_mask == 1
    missing = np.flatnonzero(is_action & ~entry.claimed[record.num_prompt_tokens :])
    if missing.size:
        raise TrajectoryError(
            f"response_mask[{missing[0]}] is not 1, but the engine sampled the token"
            f" {record.response_ids[missing[0]]} there; turnwise trains all sampled tokens of a trajectory or none"
        )


def _starts_with(ids: TokenArray, start: TokenArray) -> bool:
    return len(start) <= len(ids) and bool((ids[: len(start)] == start).all())


def _common_length(first: TokenArray, second: TokenArray) -> int:
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if different.size else size
