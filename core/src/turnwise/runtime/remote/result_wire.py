"""
Wire format from workers to the driver: finished episodes, with the tokens of all of them in a few columns.

The record of an episode consists of many small arrays. Pickling and copying each of them would take longer than sending
their contents, so a message has one array for the ids of all records, and so on. Columns that follow from the segments
of a record, such as its positions, do not travel. This module does not depend on Ray, or on how a message is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np
from attrs import fields, frozen
from numpy.typing import DTypeLike, NDArray

from turnwise.record.columns import Origin, Segment
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.runtime.remote.picture_packets import show_pictures
from turnwise.types import Array, FloatArray, Status, TokenArray

_NAMES: Final = tuple(attribute.name for attribute in fields(EpisodeResult) if attribute.name != "trajectories")
_values: Final = attrgetter(*_NAMES)
_ORIGINS: Final = tuple(Origin)


@frozen(kw_only=True, eq=False)
class ToDriver:
    """
    One message of a worker: n episodes with m records, of which k are in the columns.

    Attributes:
        numbers: n keys, by which the worker received the episodes.
        results: n tuples with the attributes of an `EpisodeResult` except its records, in their order.
        num_records: n numbers of records.
        records: m records, in the order of the episodes; None for a record in the columns.
        num_prompt_tokens: (k,) prompt tokens of each record in the columns.
        num_segments: (k,) segments of each.
        segments: (S, 3) int32: origin, start and stop of all segments.
        token_ids: (N,) int32: prompts and responses, concatenated.
        logprobs: (M,) float32 of the responses only.
        weight_versions: (M,) int32 of the responses only.
    """

    numbers: tuple[int, ...]
    results: tuple[tuple[Any, ...], ...]
    num_records: tuple[int, ...]
    records: tuple[Trajectory | None, ...]
    num_prompt_tokens: NDArray[np.int32]
    num_segments: NDArray[np.int32]
    segments: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    token_ids: TokenArray
    logprobs: FloatArray
    weight_versions: TokenArray


def pack_episodes(finished: Sequence[tuple[int, EpisodeResult]]) -> ToDriver:
    """Pack (number, result) pairs."""
    records: list[Trajectory | None] = []
    plain: list[Trajectory] = []  # records that go into the columns
    for _number, result in finished:
        for trajectory in result.trajectories:
            in_columns = _follows_from_segments(result, trajectory)
            records.append(None if in_columns else trajectory)
            if in_columns:
                plain.append(trajectory)
    # Without paths: a record that has any is not in the columns.
    segments = [(s.origin, s.start, s.stop) for trajectory in plain for s in trajectory.segments]
    prompts = [trajectory.num_prompt_tokens for trajectory in plain]
    return ToDriver(
        numbers=tuple(number for number, _result in finished),
        results=tuple(_values(result) for _number, result in finished),
        num_records=tuple(len(result.trajectories) for _number, result in finished),
        records=tuple(records),
        num_prompt_tokens=np.array(prompts, np.int32),
        num_segments=np.array([len(trajectory.segments) for trajectory in plain], np.int32),
        segments=np.array(segments, np.int32).reshape(-1, 3),
        num_tokens=np.array([len(trajectory) for trajectory in plain], np.int32),
        token_ids=_concatenate([trajectory.input_ids for trajectory in plain], np.int32),
        logprobs=_concatenate([trajectory.logprobs for trajectory in plain], np.float32),
        weight_versions=_concatenate([trajectory.weight_versions for trajectory in plain], np.int32),
    )


def _concatenate(pieces: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


def _follows_from_segments(result: EpisodeResult, trajectory: Trajectory) -> bool:
    """Whether all else follows from the segments; not so with paths, open columns or pictures, or if it is broken."""
    others = trajectory.has_blocks or trajectory.open_paths or trajectory.columns or trajectory.pictures
    return not (others or result.status is Status.FAILED)


def has_pictures(result: EpisodeResult) -> bool:
    """Return whether a task or its episode has pictures."""
    messages = (result.task.messages, result.messages, result.unfinished.messages if result.unfinished else ())
    return any(record.pictures for record in result.trajectories) or any(map(show_pictures, messages))


def unpack_episodes(message: ToDriver) -> Iterator[tuple[int, EpisodeResult]]:
    """Yield the (number, result) pairs of a message; they keep none of its memory alive."""
    records = _records(message)
    for number, values, num_records in zip(message.numbers, message.results, message.num_records, strict=True):
        trajectories = tuple(next(records) for _ in range(num_records))
        yield number, EpisodeResult(**dict(zip(_NAMES, values, strict=True)), trajectories=trajectories)


def _records(message: ToDriver) -> Iterator[Trajectory]:
    plain = _plain_records(message)
    for record in message.records:
        yield next(plain) if record is None else record


def _plain_records(message: ToDriver) -> Iterator[Trajectory]:
    segments = [Segment(_ORIGINS[origin], start, stop) for origin, start, stop in message.segments.tolist()]
    shapes = (message.num_prompt_tokens.tolist(), message.num_segments.tolist(), message.num_tokens.tolist())
    first = start = response = 0
    for num_prompt_tokens, num_segments, num_tokens in zip(*shapes, strict=True):
        own = segments[first : first + num_segments]
        end = response + num_tokens - num_prompt_tokens
        columns: dict[str, Array] = {  # copies: a view would keep the message alive, and its memory
            "token_ids": message.token_ids[start : start + num_tokens].copy(),
            "logprobs": message.logprobs[response:end].copy(),
            "origins": _origins(own, num_prompt_tokens, num_tokens),
            "weight_versions": message.weight_versions[response:end].copy(),
        }
        yield Trajectory.from_columns(columns, own, num_prompt_tokens)
        first, start, response = first + num_segments, start + num_tokens, end


def _origins(segments: Sequence[Segment], num_prompt_tokens: int, num_tokens: int) -> NDArray[np.uint8]:
    origins = np.zeros(num_tokens - num_prompt_tokens, np.uint8)
    for segment in segments:
        origins[segment.start - num_prompt_tokens : segment.stop - num_prompt_tokens] = segment.origin
    return origins
