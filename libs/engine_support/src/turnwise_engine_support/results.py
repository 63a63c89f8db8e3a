"""Results of requests: weight versions, log-probabilities, and the counters of `stats`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from attrs import asdict, define
from numpy.typing import ArrayLike

from turnwise.errors import EngineError
from turnwise.types import FloatArray, GenerateRequest, GenerateResult, TokenArray

VersionSpan = tuple[int, int, int]
"""A weight version, and its tokens from start (inclusive) to end (exclusive)."""

VersionStart = tuple[int, int]
"""Index of the first token of a weight version, and the version."""


def version_spans(starts: Sequence[VersionStart], num_tokens: int) -> list[VersionSpan]:
    """Return the spans of the first tokens of an output; `starts` rise, and may continue after these tokens."""
    known = [(start, version) for start, version in list(starts) if start < num_tokens]  # a copy: a thread may append
    ends = [start for start, _ in known[1:]] + [num_tokens]
    return [(version, start, end) for (start, version), end in zip(known, ends, strict=False)]


def weight_versions(spans: Iterable[VersionSpan], num_tokens: int, current: int) -> int | TokenArray:
    """
    Return the weight version of all tokens, or (num_tokens,) int32 if they were sampled under several.

    Args:
        spans: in the order of the tokens; empty spans are ignored.
        num_tokens: number of sampled tokens.
        current: version to return if there are no tokens.

    Raises:
        EngineError: the spans do not cover exactly these tokens. An assumed version would silently correct the
            gradients of a training wrongly.
    """
    if not num_tokens:
        return current
    known = [(version, end - start) for version, start, end in spans if end > start]
    if (num_known := sum(length for _, length in known)) != num_tokens:
        raise EngineError(f"the weight versions of {num_known} tokens are known, but {num_tokens} were sampled")
    if len({version for version, _ in known}) == 1:
        return known[0][0]
    return np.repeat(np.array([version for version, _ in known], np.int32), [length for _, length in known])


def clip_logprobs(logprobs: ArrayLike) -> FloatArray:
    """Return (n,) float32 log-probabilities, at most 0: the softmax of a near-certain token may round above 1."""
    return np.minimum(np.asarray(logprobs, np.float32), np.float32(0.0))


@define
class RequestCounters:
    """
    Totals since the start of an engine.

    Attributes:
        num_requests: completed requests, aborted ones included.
        num_sampled_tokens: sampled tokens.
        num_cached_tokens: context tokens found in the prefix cache.
    """

    num_requests: int = 0
    num_sampled_tokens: int = 0
    num_cached_tokens: int = 0

    def count(self, result: GenerateResult) -> None:
        """Add one completed request."""
        self.num_requests += 1
        self.num_sampled_tokens += len(result.token_ids)
        self.num_cached_tokens += result.num_cached_tokens

    def stats(self, running: Collection[GenerateRequest]) -> dict[str, float]:
        """Return the totals, and `num_running` and `num_context_tokens` of the requests in flight."""
        num_context_tokens = sum(len(request.token_ids) for request in running)
        return {"num_running": len(running), "num_context_tokens": num_context_tokens, **asdict(self)}
