"""A request on its way to vLLM and its answer on the way back: plain data in and out, and no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from turnwise.errors import EngineError
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams, TokenArray

_GREEDY_BELOW = 1e-5
"""Where vLLM itself draws the line between drawing and taking the best id."""


def is_greedy(sampling: SamplingParams) -> bool:
    """Return whether vLLM takes the best id at every step."""
    return sampling.temperature < _GREEDY_BELOW


def num_new_tokens(request: GenerateRequest, *, max_context: int, vocab_size: int, stop_strings: bool) -> int:
    """
    Return how many tokens may be sampled.

    Raises:
        EngineError: vLLM would refuse the request, or die of it: an id outside the vocabulary ends its process.
    """
    num_context, sampling = len(request.token_ids), request.sampling
    if num_context == 0:
        raise EngineError(f"request {request.request_id!r} has an empty context")
    if num_context >= max_context:
        raise EngineError(
            f"request {request.request_id!r} has a context of {num_context} tokens: max_context is {max_context},"
            " output included"
        )
    if request.token_ids.min() < 0 or request.token_ids.max() >= vocab_size:
        raise EngineError(f"request {request.request_id!r} has ids outside the vocabulary of {vocab_size}")
    if sampling.stop and not stop_strings:
        raise EngineError("the vllm engine runs without a tokenizer, so it has no stop strings: use stop_token_ids")
    room = max_context - num_context
    return min(sampling.max_tokens or room, room)


def sampling_options(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """
    Return the keyword arguments of vLLM's `SamplingParams` that draw as asked.

    The model's own end-of-turn ids end nothing unless the request names them, and then they are told like any other.
    """
    return {
        "max_tokens": max_tokens,
        "temperature": 0.0 if is_greedy(sampling) else float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop),
        # A stop string may hold the text of a special token.
        "skip_special_tokens": False,
    }


def result_of(request: GenerateRequest, output: Any, *, version: int) -> GenerateResult:
    """
    Return the answer.

    Args:
        request: what was asked.
        output: vLLM's last `RequestOutput` of it, with one completion.
        version: of the weights now: an answer without tokens carries it.

    Raises:
        EngineError: vLLM ended the request for a reason of its own.
    """
    (completion,) = output.outputs
    reason = _finish_reason(request, completion.finish_reason)
    token_ids = np.array(completion.token_ids, np.int32)
    return GenerateResult(
        token_ids=token_ids,
        logprobs=_logprobs(request.sampling, completion.logprobs, len(token_ids)),
        finish_reason=reason,
        stop_reason=completion.stop_reason if reason is FinishReason.STOP else None,
        weight_version=versions_of(completion.weight_versions or (), len(token_ids), version),
        num_cached_tokens=min(output.num_cached_tokens or 0, len(request.token_ids)),
    )


def _finish_reason(request: GenerateRequest, reason: str | None) -> FinishReason:
    try:
        return FinishReason(reason or "none")
    except ValueError:
        raise EngineError(f"vLLM ended request {request.request_id!r} with {reason!r}") from None


def _logprobs(sampling: SamplingParams, flat: Any, num_tokens: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """
    Return (num_tokens,) float32 of the distribution drawn from: greedy draws from one id.

    vLLM tells greedy tokens their log-probability among all ids, which is not what they were drawn with.
    """
    if is_greedy(sampling) or not num_tokens:
        return np.zeros(num_tokens, np.float32)
    # With `logprobs=0` each position holds the sampled id alone. A sure one may round to a little over 1.
    return np.minimum(np.array(flat.logprobs, np.float32), np.float32(0.0))


def versions_of(spans: Iterable[Any], num_tokens: int, current: int) -> int | TokenArray:
    """
    Return the weight version of all tokens, or (num_tokens,) int32 when they have several.

    Args:
        spans: vLLM's `WeightVersionSpan`s: a version as text, and its tokens from `start` up to `end`.
        num_tokens: of the answer.
        current: version when there is no token.
    """
    known = [(int(span.version), span.start, span.end) for span in spans if span.end > span.start]
    if not num_tokens or not known:
        return current
    versions = {version for version, _, _ in known}
    if len(versions) == 1:
        return versions.pop()
    return np.repeat(np.array([version for version, _, _ in known], np.int32), [end - start for _, start, end in known])


def as_prompt(token_ids: Sequence[int] | TokenArray) -> dict[str, Any]:
    """Return a context as vLLM's rendered input, which no tokenizer touches any more."""
    return {"type": "token", "prompt_token_ids": np.asarray(token_ids).tolist()}
