"""A request on its way to SGLang and its answer on the way back: plain data in and out, and no SGLang."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import EngineError
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams, TokenArray
from turnwise_sglang_engine.frames import Frame

GREEDY, PLAIN, FILTERED = "greedy", "plain", "filtered"
"""How a token is drawn: the best id, one of all, or one of those that top-k and top-p leave."""

_GREEDY_BELOW = 1e-5
"""Temperatures under this overflow the scaled logits; vLLM draws the line at the same place."""


def num_new_tokens(request: GenerateRequest, *, max_context: int, vocab_size: int, stop_strings: bool) -> int:
    """
    Return how many tokens may be sampled.

    Raises:
        EngineError: SGLang would refuse the request, cut it short without a word, or die of it.
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
        raise EngineError("this sglang engine has no stop strings: set its option stop_strings, or use stop_token_ids")
    room = max_context - num_context
    return min(sampling.max_tokens or room, room)


def drawing(sampling: SamplingParams, vocab_size: int) -> str:
    """Return which of the three ways SGLang draws in."""
    if sampling.temperature < _GREEDY_BELOW:
        return GREEDY
    return FILTERED if sampling.top_p < 1 or 0 < sampling.top_k < vocab_size else PLAIN


def sampling_options(sampling: SamplingParams, max_tokens: int, vocab_size: int, *, seeds: bool) -> dict[str, Any]:
    """
    Return SGLang's sampling parameters that draw as asked.

    `ignore_eos` also switches the request's own stop ids off, so it is set only for requests without any. For the
    others the model's end-of-turn ids end a turn too; the server goes on after one that the request does not name.
    """
    way = drawing(sampling, vocab_size)
    options: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": 0.0 if way == GREEDY else float(sampling.temperature),
        "ignore_eos": not sampling.stop_token_ids,
        "stop_token_ids": list(sampling.stop_token_ids),
        # A stop string may hold the text of a special token.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if way == FILTERED:
        options["top_p"] = float(sampling.top_p)
        # What survives the filters is told for a finite top-k only.
        options["top_k"] = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    if sampling.stop:
        options["stop"] = list(sampling.stop)
    if seeds and sampling.seed is not None:
        options["sampling_seed"] = sampling.seed
    return options


def result_of(request: GenerateRequest, frame: Frame, *, version: int) -> GenerateResult:
    """
    Return the answer that a frame of the server holds.

    Args:
        request: what was asked.
        frame: with `reason`, `stop`, `num_cached_tokens` and `spans` of weight versions, the ids, and their
            log-probabilities unless it was greedy.
        version: of the weights now: an answer without tokens carries it.
    """
    token_ids = np.asarray(frame.arrays[0], np.int32)
    reason = FinishReason(frame.head["reason"])
    return GenerateResult(
        token_ids=token_ids,
        logprobs=_logprobs(frame, len(token_ids)),
        finish_reason=reason,
        stop_reason=frame.head["stop"] if reason is FinishReason.STOP else None,
        weight_version=_versions(frame.head["spans"], len(token_ids), version),
        num_cached_tokens=min(frame.head["num_cached_tokens"], len(request.token_ids)),
    )


def empty_result(version: int) -> GenerateResult:
    """Return the answer to a request that was ended before anything came back."""
    return GenerateResult(token_ids=[], logprobs=[], finish_reason=FinishReason.ABORT, weight_version=version)


def _logprobs(frame: Frame, num_tokens: int) -> NDArray[np.float32]:
    """Greedy draws from one id, so there is nothing to tell; a sure token may round to a little over 1."""
    if len(frame.arrays) == 1:
        return np.zeros(num_tokens, np.float32)
    return np.minimum(np.asarray(frame.arrays[1], np.float32), np.float32(0.0))


def _versions(spans: list[tuple[int, int, int]], num_tokens: int, current: int) -> int | TokenArray:
    known = [(version, end - start) for version, start, end in spans if end > start]
    if not num_tokens or not known:
        return current
    if len({version for version, _ in known}) == 1:
        return known[0][0]
    return np.repeat(np.array([version for version, _ in known], np.int32), [size for _, size in known])
