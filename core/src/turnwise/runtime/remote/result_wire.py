"""
What travels from a worker to the driver: finished episodes, the tokens of all of them in a few columns.

An episode's record is many small arrays, and to pickle and copy each by itself takes longer than what stands in them
is worth. Here a message has one array for the ids of all records, and so on; what follows from the segments of a
record, its positions among it, does not travel. Nothing here knows Ray, or how a message is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np
from attrs import fields, frozen
from numpy.typing import DTypeLike, NDArray

from turnwise.record import NO_VERSION, Origin, Segment
from turnwise.result import EpisodeResult
from turnwise.trajectory import Trajectory
from turnwise.types import FloatArray, Status, TokenArray

_NAMES: Final = tuple(attribute.name for attribute in fields(EpisodeResult) if attribute.name != "trajectories")
_values: Final = attrgetter(*_NAMES)
_ORIGINS: Final = tuple(Origin)


@frozen(kw_only=True, eq=False)
class ToDriver:
    """
    One message of a worker: n episodes with m records, of which the columns hold some.

    Attributes:
        numbers: n of them, what the worker was given the episodes under.
        results: n tuples of what an `EpisodeResult` holds besides its records, in the order of its attributes.
        num_records: n of them.
        records: m of them, those of an episode together; None for one that the columns hold.
        num_prompt_tokens: (k,) of each of the k records in the columns.
        num_segments: (k,).
        segments: (S, 3) int32 of all these records: origin, start and stop.
        num_tokens: (k,).
        token_ids: (N,) int32, prompts and responses of all these records end to end.
        logprobs: (M,) float32 of the responses alone.
        weight_versions: (M,) int32 of the responses alone.
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
    plain: list[Trajectory] = []
    for _number, result in finished:
        for trajectory in result.trajectories:
            follows = _follows_from_segments(result, trajectory)
            records.append(None if follows else trajectory)
            if follows:
                plain.append(trajectory)
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
        token_ids=_joined([trajectory.input_ids for trajectory in plain], np.int32),
        logprobs=_joined([trajectory.logprobs for trajectory in plain], np.float32),
        weight_versions=_joined([trajectory.weight_versions for trajectory in plain], np.int32),
    )


def _joined(pieces: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


def _follows_from_segments(result: EpisodeResult, trajectory: Trajectory) -> bool:
    """Whether positions and origins need not travel: a record with paths, or a broken one, goes as it is."""
    return not (trajectory.has_blocks or trajectory.open_paths or result.status is Status.FAILED)


def unpack_episodes(message: ToDriver) -> Iterator[tuple[int, EpisodeResult]]:
    """Yield the (number, result) pairs of a message; they hold on to none of its memory."""
    records = _records(message)
    for number, values, num_records in zip(message.numbers, message.results, message.num_records, strict=True):
        trajectories = tuple(next(records) for _ in range(num_records))
        yield number, EpisodeResult(**dict(zip(_NAMES, values, strict=True)), trajectories=trajectories)


def _records(message: ToDriver) -> Iterator[Trajectory]:
    plain = _plain_records(message)
    for record in message.records:
        yield next(plain) if record is None else record


def _plain_records(message: ToDriver) -> Iterator[Trajectory]:
    # Nobody writes to the columns of a record, so records can share what is alike in all of them.
    longest = int(message.num_tokens.max(initial=0))
    positions, zeros = np.arange(longest, dtype=np.int32), np.zeros(longest, np.int32)
    segments = [Segment(_ORIGINS[origin], start, stop) for origin, start, stop in message.segments.tolist()]
    shapes = (message.num_prompt_tokens.tolist(), message.num_segments.tolist(), message.num_tokens.tolist())
    first = start = response = 0
    for num_prompt_tokens, num_segments, num_tokens in zip(*shapes, strict=True):
        own = segments[first : first + num_segments]
        end = response + num_tokens - num_prompt_tokens
        columns = {
            "token_ids": message.token_ids[start : start + num_tokens].copy(),
            "logprobs": _behind(num_prompt_tokens, message.logprobs[response:end], 0.0),
            "origins": _origins(own, num_tokens),
            "weight_versions": _behind(num_prompt_tokens, message.weight_versions[response:end], NO_VERSION),
            "position_ids": positions[:num_tokens],
            "block_start": zeros[:num_tokens],
            "path_start": zeros[:num_tokens],
        }
        yield Trajectory.from_columns(columns, own, num_prompt_tokens)
        first, start, response = first + num_segments, start + num_tokens, end


def _behind(num_prompt_tokens: int, values: NDArray[Any], fill: float) -> NDArray[Any]:
    """Return (T,) values: those of the response behind a prompt that has none."""
    column = np.empty(num_prompt_tokens + len(values), values.dtype)
    column[:num_prompt_tokens] = fill
    column[num_prompt_tokens:] = values
    return column


def _origins(segments: Sequence[Segment], num_tokens: int) -> NDArray[np.uint8]:
    origins = np.zeros(num_tokens, np.uint8)  # 0 is a prompt's
    for segment in segments:
        origins[segment.start : segment.stop] = segment.origin
    return origins
