"""Checks that tokens come from the weights that they claim, and explains a token that does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.types import GenerateRequest, GenerateResult
from turnwise_testing.probes.engine import EngineProbe, expect


def expect_versions(
    probe: EngineProbe,
    answers: Sequence[tuple[GenerateRequest, GenerateResult]],
    variants: Mapping[int, int],
) -> None:
    """
    Raise `AssertionError` unless each token comes from the weights of the version that it claims.

    Args:
        probe: with a reference.
        answers: requests and their results.
        variants: variant of the reference's weights by version, for all versions so far.
    """
    for request, result in answers:
        claimed = np.broadcast_to(result.weight_version, result.token_ids.shape)
        expect((np.diff(claimed) >= 0).all(), f"weight versions fall from token to token: {claimed.tolist()}")
        for version in np.unique(claimed).tolist():
            expect(version in variants, f"tokens claim weight version {version}, which was never brought")
            wrong = (claimed == version) & (differences(probe, request, result, variants[version]) > 1.0)
            if wrong.any():
                raise AssertionError(explain(probe, request, result, int(wrong.argmax()), variants))


def differences(
    probe: EngineProbe, request: GenerateRequest, result: GenerateResult, variant: int
) -> NDArray[np.float64]:
    """
    Return (n,) distances of the tokens from a variant's weights; a token with at most 1 comes from them.

    A token of a request at temperature 0 must be the most likely one, or tie with it. Any other must have the
    log-probability of the forward pass.
    """
    assert probe.reference is not None
    ids = [*request.token_ids.tolist(), *result.token_ids.tolist()]
    temperature = request.sampling.temperature or 1.0
    scores, best = probe.reference.scores(ids, len(request.token_ids), temperature=temperature, variant=variant)
    sampled = bool(request.sampling.temperature)
    gaps: NDArray[np.float64] = (np.abs(scores - result.logprobs) if sampled else best - scores).astype(np.float64)
    return gaps / (probe.logprob_bound if sampled else 2 * probe.logprob_bound)


def explain(
    probe: EngineProbe, request: GenerateRequest, result: GenerateResult, index: int, variants: Mapping[int, int]
) -> str:
    """Return a text with the token, its claimed version, and its distances from this version and its neighbours."""
    claimed = int(np.broadcast_to(result.weight_version, result.token_ids.shape)[index])
    near = [version for version in (claimed - 1, claimed, claimed + 1) if version in variants]
    bound = probe.logprob_bound * (1 if request.sampling.temperature else 2)
    figures = (
        f"{differences(probe, request, result, variants[version])[index] * bound:.3g} under version {version}"
        for version in near
    )
    return (
        f"token {index} of {len(result.token_ids)} of request {request.request_id!r}, id"
        f" {int(result.token_ids[index])}, claims weight version {claimed}; its log-probability is off by"
        f" {', '.join(figures)} nats, and at most {bound:.3g} are allowed"
    )
