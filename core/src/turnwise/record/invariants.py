"""
The promises of the token record, checked on every trajectory that leaves the orchestrator.

Positions and visibility are derived here a second time, from the segments alone, so that a fault in
`turnwise.record.trajectory` shows as a disagreement. The check costs O(tokens) in numpy and O(segments) in Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import InvariantError
from turnwise.record.columns import NO_VERSION, Origin, Segment
from turnwise.record.lineage import RecordLineage
from turnwise.record.trajectory import Trajectory
from turnwise.types import GenerateResult, TokenArray

_LAYOUT: Final = ("position_ids", "block_start", "path_start")
"""The columns that follow from the segments, in the order of `expected_layout`."""


def check_trajectory(trajectory: Trajectory) -> None:
    """
    Check the promises that concern one record.

    Raises:
        InvariantError: the text names the broken promise and the first place.
    """
    _check_lengths(trajectory)
    _check_segments(trajectory)
    _check_actions(trajectory)
    _check_layout(trajectory)


def check_sampled(trajectory: Trajectory, sampled: Sequence[GenerateResult]) -> None:
    """
    Check that the actions of a record are the tokens that the engine returned, or the first of them after a cut.

    Raises:
        InvariantError: an id or a log-probability differs from the sampled one.
    """
    if trajectory.has_blocks:
        _check_sampled_multiset(trajectory, sampled)
        return
    where = trajectory.response_mask.astype(bool)
    for name, recorded, answers in (
        ("token ids", trajectory.response_ids[where], [result.token_ids for result in sampled]),
        ("log-probabilities", trajectory.logprobs[where], [result.logprobs for result in sampled]),
    ):
        expected = np.concatenate(answers) if answers else np.empty(0)
        if not np.array_equal(recorded, expected[: len(recorded)]):
            raise InvariantError(f"the recorded {name} differ from the engine's")


def check_lineage(trajectories: Sequence[Trajectory], lineage: Sequence[RecordLineage]) -> None:
    """
    Check that each record starts with the tokens that it shares with its parent, none of them trained a second time.

    Raises:
        InvariantError: the text names the record.
    """
    for number, line in enumerate(lineage):  # empty without a described or branched record
        if line.parent is None:
            continue
        trajectory, parent = trajectories[number], trajectories[line.parent]
        shared = slice(line.num_shared_tokens)
        response = slice(max(0, line.num_shared_tokens - trajectory.num_prompt_tokens))
        equal = [
            np.array_equal(trajectory.input_ids[shared], parent.input_ids[shared]),
            np.array_equal(trajectory.logprobs[response], parent.logprobs[response]),
            np.array_equal(trajectory.weight_versions[response], parent.weight_versions[response]),
        ]
        if not all(equal) or trajectory.response_mask[response].any():
            raise InvariantError(f"record {number} does not replay the tokens that it shares with record {line.parent}")


def _check_sampled_multiset(trajectory: Trajectory, sampled: Sequence[GenerateResult]) -> None:
    # Paths finish in any order, so only the collection of sampled pairs is known here.
    where = trajectory.response_mask.astype(bool)
    recorded = Counter(zip(trajectory.response_ids[where].tolist(), trajectory.logprobs[where].tolist(), strict=True))
    expected: Counter[tuple[int, float]] = Counter()
    for result in sampled:
        expected.update(zip(result.token_ids.tolist(), result.logprobs.tolist(), strict=True))
    if not recorded <= expected:
        raise InvariantError("the recorded actions differ from the engine's")


def _check_lengths(trajectory: Trajectory) -> None:
    of_response = ("response_ids", "response_mask", "logprobs", "weight_versions")
    for name in (*of_response, *_LAYOUT):
        length = trajectory.num_response_tokens if name in of_response else len(trajectory)
        if len(column := getattr(trajectory, name)) != length:
            raise InvariantError(f"{name} has {len(column)} entries, expected {length}")


def _check_segments(trajectory: Trajectory) -> None:
    """Segments tile the response without gap or overlap, and the origin of each token is its segment's."""
    stop = trajectory.num_prompt_tokens
    for segment in trajectory.segments:
        if segment.start != stop or segment.stop <= segment.start:
            raise InvariantError(f"segment {segment.start}:{segment.stop} does not follow token {stop}")
        stop = segment.stop
    if stop != len(trajectory):
        raise InvariantError(f"segments end at {stop}, the record at {len(trajectory)}")
    lengths = [s.stop - s.start for s in trajectory.segments]
    origins = np.repeat(np.array([s.origin for s in trajectory.segments], np.uint8), lengths)
    _refuse_difference("origins", trajectory.origins, origins, trajectory.num_prompt_tokens)


def _check_actions(trajectory: Trajectory) -> None:
    """The mask is 1 exactly on actions; only they and replayed ones have log-probabilities and weight versions."""
    action = trajectory.origins == Origin.ACTION
    _refuse_difference("response_mask", trajectory.response_mask, action, trajectory.num_prompt_tokens)
    sampled = action | (trajectory.origins == Origin.REPLAYED)
    if not np.isfinite(trajectory.logprobs).all():
        raise InvariantError("a log-probability is not finite")
    if trajectory.logprobs[~sampled].any():
        raise InvariantError("a token that was not sampled has a log-probability")
    if ((trajectory.weight_versions >= 0) != sampled).any():
        raise InvariantError(f"weight versions must be >= 0 on sampled tokens and {NO_VERSION} elsewhere")


def _check_layout(trajectory: Trajectory) -> None:
    expected = expected_layout(trajectory.num_prompt_tokens, trajectory.segments)
    for name, derived in zip(_LAYOUT, expected, strict=True):
        _refuse_difference(name, getattr(trajectory, name), derived, 0)


def expected_layout(num_prompt_tokens: int, segments: Sequence[Segment]) -> tuple[TokenArray, TokenArray, TokenArray]:
    """
    Derive the layout from the segments alone.

    Returns:
        position_ids, block_start, path_start: each (T,) int32.
    """
    total = segments[-1].stop if segments else num_prompt_tokens
    positions, block_start, path_start = (np.zeros(total, np.int32) for _ in range(3))
    positions[:num_prompt_tokens] = np.arange(num_prompt_tokens)
    # `top` is the largest position that the next token outside the block sees; `base` is the one that its paths see.
    top = base = num_prompt_tokens - 1
    for run, starts_block in _runs(segments):
        start, stop = run[0].start, run[-1].stop
        if run[0].block < 0 or starts_block:
            base, first = top, start
        positions[start:stop] = base + 1 + np.arange(stop - start)
        if run[0].block >= 0:
            block_start[start:stop], path_start[start:stop] = first, start
        top = max(top, int(positions[stop - 1]))
    return positions, block_start, path_start


def _runs(segments: Sequence[Segment]) -> Iterator[tuple[list[Segment], bool]]:
    """Yield the segments of one path, or between blocks, together, and whether a block starts with them."""
    run: list[Segment] = []
    block = -1
    for segment in segments:
        if run and (segment.block, segment.path) != (run[-1].block, run[-1].path):
            yield run, run[0].block != block
            block, run = run[0].block, []
        run.append(segment)
    if run:
        yield run, run[0].block != block


def _refuse_difference(name: str, recorded: NDArray[np.generic], derived: NDArray[np.generic], offset: int) -> None:
    differs = recorded != derived
    if differs.any():
        at = int(differs.argmax())
        raise InvariantError(f"{name} at token {at + offset} is {recorded[at]}, expected {derived[at]}")
