"""
Rows for engines that see plain text: each path in the context that the engine saw, shared prefixes masked.

An engine without layouts samples each path of a block after the record up to the fork. It samples the text after the
block after all paths in a line, with plain positions. So the first path and all text outside blocks make one plain row,
in which the other paths are context. Each other path makes a separate row, in which everything before it is context.

The same idea is the training format of ThreadWeaver (arXiv:2512.07843).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import frozen

from turnwise.record.columns import Origin, Segment
from turnwise.record.pictures import cut_out
from turnwise.record.result import token_scores
from turnwise.record.trajectory import Trajectory
from turnwise.types import Array, Score, TokenScore, TrajectoryScore


@frozen
class _Row:
    """Segments of a record that make a row, and the starts of the trained ones."""

    segments: Sequence[Segment]
    trained: frozenset[int]


def expand(trajectory: Trajectory, score: Score | None) -> Iterator[tuple[Trajectory, Score | None]]:
    """
    Yield the rows of a record, each with its score; a record without blocks makes one row.

    Every row gets a score for the whole trajectory, because the episode's reward trains each of them. Scores of turns
    and tokens go to the row that trains their tokens.
    """
    if not trajectory.has_blocks:
        yield trajectory, score
        return
    for row in _rows(trajectory.segments):
        yield _flat(trajectory, row), _part(trajectory, score, row)


def _rows(segments: Sequence[Segment]) -> Iterator[_Row]:
    firsts: dict[int, int] = {}
    for segment in segments:
        firsts.setdefault(segment.block, segment.path)
    main = [s for s in segments if s.path == firsts[s.block]]
    yield _Row(segments, frozenset(s.start for s in main))
    others = [s for s in segments if s.path != firsts[s.block]]
    for place in dict.fromkeys((s.block, s.path) for s in others):
        own = [s for s in others if (s.block, s.path) == place]
        if any(s.origin is Origin.ACTION for s in own):
            before = [s for s in segments if s.block != place[0] and s.start < own[0].start]
            yield _Row([*before, *own], frozenset(s.start for s in own))


def _flat(trajectory: Trajectory, row: _Row) -> Trajectory:
    prompt = trajectory.num_prompt_tokens
    flat = Trajectory(cut_out(trajectory, 0, prompt))
    for segment in row.segments:
        ids = trajectory.input_ids[segment.start : segment.stop]
        if segment.origin.is_turn and segment.start in row.trained:
            own = slice(segment.start - prompt, segment.stop - prompt)
            constrained = segment.origin is Origin.CONSTRAINED
            flat.add_action(ids, trajectory.logprobs[own], trajectory.weight_versions[own], constrained=constrained)
        elif segment.origin is Origin.FORCED:
            flat.add_forced(ids)
        else:
            flat.add_observation(cut_out(trajectory, segment.start, segment.stop))
    for name, spec in trajectory.columns.items():
        flat = flat.with_column(spec, _column_of(trajectory, name, row))
    return flat


def _column_of(trajectory: Trajectory, name: str, row: _Row) -> Array:
    """Return the values of an open column of a row; context that the policy sampled is not sampled in the row."""
    spec, values, prompt = trajectory.columns[name], trajectory.column(name), trajectory.num_prompt_tokens
    first = prompt if spec.of_responses else 0
    pieces = [values[:prompt]] if first == 0 else []
    for segment in row.segments:
        own = values[segment.start - first : segment.stop - first]
        is_context = not segment.origin.is_turn or segment.start not in row.trained
        pieces.append(spec.filled(len(own)) if spec.tokens == "sampled" and is_context else own)
    return np.concatenate([spec.filled(0), *pieces])


def _part(trajectory: Trajectory, score: Score | None, row: _Row) -> Score | None:
    if score is None or isinstance(score, TrajectoryScore):
        return score
    values, prompt = token_scores(score, trajectory), trajectory.num_prompt_tokens
    pieces = [values[s.start - prompt : s.stop - prompt] * (s.start in row.trained) for s in row.segments]
    return TokenScore(values=tuple(np.concatenate(pieces).tolist()), extra=score.extra)
