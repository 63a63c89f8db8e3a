"""One turn of the model: its request's seed, and how the parts of a turn that was cut are asked for and joined."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, cast

import numpy as np
from attrs import evolve

from turnwise.episode_spec import EpisodeSpec, TurnPlace
from turnwise.errors import EngineError
from turnwise.trajectory import Trajectory
from turnwise.types import FinishReason, GenerateRequest, GenerateResult


def request_seed(spec: EpisodeSpec, place: TurnPlace) -> int:
    """Derive a seed from what is asked, never from when or where: arrival order must not matter."""
    name = f"{spec.seed}|{spec.global_step}|{spec.validation}|{spec.uid}|{place}"
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") >> 1


def refuse_overlong(result: GenerateResult, request: GenerateRequest) -> None:
    """Raise `EngineError` when an engine sampled more than it was asked for."""
    limit = request.sampling.max_tokens
    if limit is not None and len(result.token_ids) > limit:
        raise EngineError(f"the engine returned {len(result.token_ids)} tokens for max_tokens={limit}")


def continued(request: GenerateRequest, kept: GenerateResult) -> GenerateRequest | None:
    """
    Return the request for the rest of a turn that was cut, or None when nothing is left to sample.

    The seed is another one: the draws of the first part must not come again.
    """
    limit, ids = request.sampling.max_tokens, kept.token_ids
    ended = len(ids) > 0 and int(ids[-1]) in request.sampling.stop_token_ids
    if ended or (limit is not None and len(ids) >= limit):
        return None
    if len(ids) == 0:
        return request
    seed = request.sampling.seed
    sampling = request.sampling.with_(
        max_tokens=None if limit is None else limit - len(ids),
        seed=None if seed is None else (seed + 2_654_435_761 * len(ids)) % 2**31,
    )
    return evolve(request, token_ids=np.concatenate([request.token_ids, ids]), sampling=sampling)


def joined(kept: GenerateResult | None, rest: GenerateResult | None, request: GenerateRequest) -> GenerateResult:
    """Return a turn of two parts as one answer: each token has the log-probability and version it was sampled with."""
    if kept is None or rest is None:
        return rest or _ended(cast("GenerateResult", kept), request)
    return evolve(
        rest,
        token_ids=np.concatenate([kept.token_ids, rest.token_ids]),
        logprobs=np.concatenate([kept.logprobs, rest.logprobs]),
        weight_version=_versions(kept, rest),
        num_cached_tokens=kept.num_cached_tokens + rest.num_cached_tokens,
    )


def _ended(kept: GenerateResult, request: GenerateRequest) -> GenerateResult:
    """Return a turn that was cut just where it ended anyway."""
    last = int(kept.token_ids[-1])
    if last in request.sampling.stop_token_ids:
        return evolve(kept, finish_reason=FinishReason.STOP, stop_reason=last)
    return evolve(kept, finish_reason=FinishReason.LENGTH)


def _versions(kept: GenerateResult, rest: GenerateResult) -> Any:
    parts = [part for part in (kept, rest) if len(part.token_ids)]
    versions = [np.broadcast_to(np.asarray(part.weight_version, np.int32), len(part.token_ids)) for part in parts]
    if not versions:
        return rest.weight_version
    merged = np.concatenate(versions)
    return int(merged[0]) if bool((merged == merged[0]).all()) else merged


def recorded_turns(trajectory: Trajectory) -> list[GenerateResult]:
    """Return what of a restored record the engine had sampled, for the check of what is sampled behind it."""
    parts = [record.sampled() for record in (trajectory, *trajectory.open_paths)]
    return [GenerateResult(token_ids=i, logprobs=v, finish_reason=FinishReason.STOP) for i, v in parts]
