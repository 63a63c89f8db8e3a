"""Engine requests of an episode, and turns that an interrupt splits into two requests."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from attrs import define, evolve, field

from turnwise.layout import Layout
from turnwise.record.spec import EpisodeSpec, TurnPosition
from turnwise.record.trajectory import Path, Trajectory
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams


@define(eq=False)
class TurnRequests:
    """
    Builds the requests of one episode.

    Attributes:
        spec: which episode.
        key: of this attempt; request and trajectory ids start with it.
    """

    spec: EpisodeSpec
    key: str
    _num_requests: int = field(default=0, init=False)

    def build(
        self, record: Trajectory | Path, position: TurnPosition, sampling: SamplingParams, *, with_layout: bool
    ) -> GenerateRequest:
        """
        Return the request for the next turn of a record.

        Args:
            record: the last trajectory, or one of its paths.
            position: start of the turn.
            sampling: parameters of the turn; without a seed it gets its own.
            with_layout: send the layout of a forked record.
        """
        # A given seed is kept, although it makes the rollouts of a group equal.
        if sampling.seed is None:
            sampling = sampling.with_(seed=_derive_seed(self.spec, position))
        self._num_requests += 1
        return GenerateRequest(
            request_id=f"{self.key}-{self._num_requests}",
            trajectory_id=self._name_record(position),
            group_id=self.spec.task.uid,
            token_ids=record.input_ids,
            sampling=sampling,
            layout=_layout(record) if with_layout else None,
        )

    def _name_record(self, position: TurnPosition) -> str:
        """Return the episode's key; the names of further records and of paths continue it after a slash."""
        # Routers and replicas recognize the episode by the part before the slash, and release all its contexts by it.
        num_records, num_tokens, path, _ = position
        if path >= 0:
            return f"{self.key}/{num_records - 1}.{num_tokens}.{path}"
        return f"{self.key}/{num_records - 1}" if num_records > 1 else self.key


def locate_turn(trajectories: Sequence[Trajectory], record: Trajectory | Path) -> TurnPosition:
    """Return the start of the next turn of a record."""
    num_tokens = len(trajectories[-1])
    if isinstance(record, Path):
        return (len(trajectories), num_tokens, record.index, len(record))
    return (len(trajectories), num_tokens, -1, num_tokens)


def continue_request(request: GenerateRequest, saved: GenerateResult) -> GenerateRequest | None:
    """Return the request for the rest of an interrupted turn, or None if nothing is left to sample."""
    limit, ids = request.sampling.max_tokens, saved.token_ids
    ended = len(ids) > 0 and int(ids[-1]) in request.sampling.stop_token_ids
    if ended or (limit is not None and len(ids) >= limit):
        return None
    if len(ids) == 0:
        return request
    seed = request.sampling.seed
    sampling = request.sampling.with_(
        max_tokens=None if limit is None else limit - len(ids),
        # The first part has used the draws of the request's own seed: with it, the rest would repeat them.
        seed=None if seed is None else (seed + 2_654_435_761 * len(ids)) % 2**31,
    )
    return evolve(request, token_ids=np.concatenate([request.token_ids, ids]), sampling=sampling)


def join_turn(saved: GenerateResult, rest: GenerateResult | None, request: GenerateRequest) -> GenerateResult:
    """
    Return a turn of two parts as one result. Each token keeps its log-probability and weight version.

    Args:
        saved: the part before an interrupt.
        rest: result of `continue_request`; None if nothing was left to sample.
        request: for the whole turn.
    """
    if rest is None:
        return _end_turn(saved, request)
    return evolve(
        rest,
        token_ids=np.concatenate([saved.token_ids, rest.token_ids]),
        logprobs=np.concatenate([saved.logprobs, rest.logprobs]),
        weight_version=_join_versions(saved, rest),
        num_cached_tokens=saved.num_cached_tokens + rest.num_cached_tokens,
    )


def _derive_seed(spec: EpisodeSpec, position: TurnPosition) -> int:
    # From names alone: results must depend neither on time nor on the order in which requests arrive.
    name = f"{spec.seed}|{spec.global_step}|{spec.validation}|{spec.uid}|{position}"
    # 31 bits: a valid seed for every engine, whether it reads 32 bits signed or unsigned.
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


def _layout(record: Trajectory | Path) -> Layout | None:
    """Return the layout of a request: none before the first fork."""
    return record.layout if isinstance(record, Path) or record.has_blocks else None


def _end_turn(saved: GenerateResult, request: GenerateRequest) -> GenerateResult:
    """Return a turn that was complete when it was interrupted, with its real finish reason."""
    last = int(saved.token_ids[-1])
    if last in request.sampling.stop_token_ids:
        return evolve(saved, finish_reason=FinishReason.STOP, stop_reason=last)
    return evolve(saved, finish_reason=FinishReason.LENGTH)


def _join_versions(saved: GenerateResult, rest: GenerateResult) -> Any:
    parts = [part for part in (saved, rest) if len(part.token_ids)]
    versions = [np.broadcast_to(np.asarray(part.weight_version, np.int32), len(part.token_ids)) for part in parts]
    if not versions:
        return rest.weight_version
    merged = np.concatenate(versions)
    # One int if there was no update in between, as engines return it: an array costs memory for each token.
    return int(merged[0]) if bool((merged == merged[0]).all()) else merged
