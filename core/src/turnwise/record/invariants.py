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
from turnwise.record.columns import NO_VERSION, Origin, Segment, is_in_turn, is_sampled
from turnwise.record.lineage import RecordLineage
from turnwise.record.pictures import places
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
    if trajectory.pictures:
        _check_pictures(trajectory)


def check_sampled(trajectory: Trajectory, sampled: Sequence[GenerateResult]) -> None:
    """
    Check that the turns of a record are the tokens that the engine returned, or the first of them after a cut.

    Raises:
        InvariantError: an id or a log-probability differs from the sampled one.
    """
    if trajectory.has_blocks:
        _check_sampled_multiset(trajectory, sampled)
        return
    ids, logprobs = trajectory.sampled()
    for name, recorded, answers in (
        ("token ids", ids, [result.token_ids for result in sampled]),
        ("log-probabilities", logprobs, [result.logprobs for result in sampled]),
    ):
        expected = np.concatenate(answers)[: len(recorded)] if answers else np.empty(0, recorded.dtype)
        if recorded.tobytes() != expected.tobytes() and not np.array_equal(recorded, expected):
            raise InvariantError(f"the recorded {name} differ from the engine's")
    for name in trajectory.columns:
        check_sampled_column(trajectory, sampled, name)


def check_sampled_column(trajectory: Trajectory, sampled: Sequence[GenerateResult], name: str) -> None:
    """Check that the turns of a record without blocks have the engine's values of an open column, and else its fill."""
    spec = trajectory.columns[name]
    if not any(each.columns and name in each.columns for each in sampled):  # the values of a scorer
        return
    recorded = (trajectory.sampled_columns() or {})[name]
    answers = [
        spec.filled(num_new)
        if each.columns is None or name not in each.columns
        else each.columns[name][len(each.columns[name]) - num_new :]
        for each in sampled
        for num_new in [len(each.token_ids)]
    ]
    expected = np.concatenate([spec.filled(0), *answers])[: len(recorded)]
    if spec.tokens == "all":  # a later request may give the values that the answers lack
        lacking = spec.is_fill(expected)
        expected[lacking] = recorded[lacking]
    if recorded.tobytes() != expected.tobytes():
        raise InvariantError(f"the recorded values of column {name!r} differ from the engine's")


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
            _places_before(trajectory, shared.stop) == _places_before(parent, shared.stop),
        ]
        if not all(equal) or is_in_turn(trajectory.origins[response]).any():
            raise InvariantError(f"record {number} does not replay the tokens that it shares with record {line.parent}")


def _check_sampled_multiset(trajectory: Trajectory, sampled: Sequence[GenerateResult]) -> None:
    # Paths finish in any order, so only the collection of sampled pairs is known here.
    where = is_in_turn(trajectory.origins)
    recorded = Counter(zip(trajectory.response_ids[where].tolist(), trajectory.logprobs[where].tolist(), strict=True))
    expected: Counter[tuple[int, float]] = Counter()
    for result in sampled:
        expected.update(zip(result.token_ids.tolist(), result.logprobs.tolist(), strict=True))
    if not recorded <= expected:
        raise InvariantError("the recorded turns differ from the engine's")


def _check_lengths(trajectory: Trajectory) -> None:
    length = trajectory.num_response_tokens  # the other checks compare the lengths of the other columns
    for name in ("response_ids", "logprobs", "weight_versions"):
        if len(column := getattr(trajectory, name)) != length:
            raise InvariantError(f"{name} has {len(column)} entries, expected {length}")
    for name, spec in trajectory.columns.items():
        wanted = length if spec.of_responses else len(trajectory)
        if len(values := trajectory.column(name)) != wanted:
            raise InvariantError(f"column {name!r} has {len(values)} entries, expected {wanted}")


def _check_segments(trajectory: Trajectory) -> None:
    """Segments tile the response without gap or overlap, and the origin of each token is its segment's."""
    stop, segments = trajectory.num_prompt_tokens, trajectory.segments
    for segment in segments:
        if segment.start != stop or segment.stop <= segment.start:
            raise InvariantError(f"segment {segment.start}:{segment.stop} does not follow token {stop}")
        stop = segment.stop
    if stop != len(trajectory):
        raise InvariantError(f"segments end at {stop}, the record at {len(trajectory)}")
    origins = np.frombuffer(bytes([segment.origin for segment in segments]), np.uint8)
    origins = np.repeat(origins, [segment.stop - segment.start for segment in segments])
    _refuse_difference("origins", trajectory.origins, origins, trajectory.num_prompt_tokens)


def _check_actions(trajectory: Trajectory) -> None:
    """The mask is 1 exactly on actions; only sampled tokens have log-probabilities and weight versions."""
    origins, logprobs = trajectory.origins, trajectory.logprobs
    action = origins == int(Origin.ACTION)  # numpy is slow with the member
    _refuse_difference("response_mask", trajectory.response_mask, action, trajectory.num_prompt_tokens)
    sampled = is_sampled(origins)
    if 0 in np.isfinite(logprobs).tobytes():
        raise InvariantError("a log-probability is not finite")
    if 1 in (logprobs.astype(bool) > sampled).tobytes():
        raise InvariantError("a token that was not sampled has a log-probability")
    if 1 in ((trajectory.weight_versions >= 0) != sampled).tobytes():
        raise InvariantError(f"weight versions must be >= 0 on sampled tokens and {NO_VERSION} elsewhere")


def _check_pictures(trajectory: Trajectory) -> None:
    """Each picture lies whole in the prompt or in one observation, and no other one overlaps it."""
    observed = [(s.start, s.stop) for s in trajectory.segments if s.origin is Origin.OBSERVATION]
    spans, last = [(0, trajectory.num_prompt_tokens), *observed], 0
    for each in trajectory.pictures:
        if each.start < last or not any(start <= each.start and each.stop <= stop for start, stop in spans):
            raise InvariantError(f"the picture of tokens {each.start}:{each.stop} is not whole in one observation")
        last = each.stop


def _places_before(trajectory: Trajectory, stop: int) -> list[tuple[object, ...]]:
    return places(tuple(each for each in trajectory.pictures if each.start < stop))


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
    if {segment.block for segment in segments} <= {-1}:
        zeros = np.zeros(total, np.int32)
        return np.arange(total, dtype=np.int32), zeros, zeros
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
    if len(recorded) != len(derived):
        raise InvariantError(f"{name} has {len(recorded)} entries, expected {len(derived)}")
    differs = recorded != derived
    if 1 in differs.tobytes():  # a third of the time of `any`
        at = int(differs.argmax())
        raise InvariantError(f"{name} at token {at + offset} is {recorded[at]}, expected {derived[at]}")
