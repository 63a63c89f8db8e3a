"""Requests and results in vLLM's terms, as plain data: vLLM is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from turnwise.errors import EngineError
from turnwise.types import FinishReason, FloatArray, GenerateRequest, GenerateResult, SamplingParams, TokenArray
from turnwise_engine_support.requests import check_context, check_grammar, is_greedy, num_new_tokens
from turnwise_engine_support.results import VersionSpan, clip_logprobs, weight_versions
from turnwise_moe_routes.shapes import COLUMN, Routes, RouteShape

SAMPLING_OPTIONS = frozenset({"frequency_penalty", "min_p", "min_tokens", "presence_penalty", "repetition_penalty"})
"""Options of vLLM's `SamplingParams` that a request may add; vLLM reports log-probabilities after all of them."""


GRAMMAR_ARGUMENT = "turnwise_grammar"
"""Key of a grammar in `extra_args` of vLLM's `SamplingParams`, where `GrammarProcessor` finds it."""


def check_request(
    request: GenerateRequest,
    *,
    max_context: int,
    vocab_size: int,
    stop_strings: bool,
    grammars: bool,
    reads_pictures: bool = False,
) -> int:
    """
    Return the most tokens to sample for a request.

    Raises:
        EngineError: vLLM would refuse the request or crash: an id outside the vocabulary ends its process.
    """
    check_context(request, max_context=max_context, vocab_size=vocab_size, reads_pictures=reads_pictures)
    if request.sampling.stop and not stop_strings:
        raise EngineError("the vllm engine has no tokenizer, which stop strings need: use stop_token_ids")
    if request.grammar is not None:
        if not grammars:
            raise EngineError("the vllm engine has no grammars: set its option grammars")
        check_grammar(request, "min_tokens")
    return num_new_tokens(request, max_context)


def sampling_options(request: GenerateRequest, max_tokens: int) -> dict[str, Any]:
    """
    Return the keyword arguments of vLLM's `SamplingParams`.

    The model's own end-of-turn ids stop a request only if it names them.
    """
    sampling, grammar = request.sampling, request.grammar
    options = {
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
        # A stop string may contain the text of a special token.
        "skip_special_tokens": False,
        **sampling.extra,
    }
    if grammar is not None:
        asked = {"text": grammar.text, "num_read": grammar.num_read, "stops": list(sampling.stop_token_ids)}
        options["extra_args"] = {GRAMMAR_ARGUMENT: asked}
    return options


def parse_result(
    request: GenerateRequest, output: Any, *, version: int, routes: RouteShape | None = None
) -> GenerateResult:
    """
    Return the result of a request.

    Args:
        request: the request.
        output: vLLM's last `RequestOutput` for it, with one completion.
        version: current weight version, for a result without tokens.
        routes: sizes of the experts that the result has; None if it has none.

    Raises:
        EngineError: vLLM ended the request for another reason than stop, length or abort.
    """
    (completion,) = output.outputs
    reason = _finish_reason(request, completion.finish_reason)
    token_ids = np.array(completion.token_ids, np.int32)
    spans = _version_spans(completion.weight_versions or ())
    return GenerateResult(
        token_ids=token_ids,
        logprobs=_logprobs(request.sampling, completion.logprobs, len(token_ids)),
        finish_reason=reason,
        stop_reason=completion.stop_reason if reason.has_stop else None,
        weight_version=weight_versions(spans, len(token_ids), version),
        # A request that an update sent back to the queue counts its own output too.
        num_cached_tokens=min(output.num_cached_tokens or 0, len(request.token_ids)),
        columns=None if routes is None else {COLUMN: _routes(request, completion, routes)},
    )


def _routes(request: GenerateRequest, completion: Any, shape: RouteShape) -> Routes:
    """Return (n, layers, top_k) experts of context and output; an aborted request may have none."""
    given = () if completion.routed_experts is None else completion.routed_experts
    return shape.pad(given, len(request.token_ids) + len(completion.token_ids), "vLLM")


def empty_result(version: int) -> GenerateResult:
    """Return the result of a request that was aborted before vLLM had it."""
    return GenerateResult(token_ids=[], logprobs=[], finish_reason=FinishReason.ABORT, weight_version=version)


def _finish_reason(request: GenerateRequest, reason: str | None) -> FinishReason:
    try:
        return FinishReason(reason or "none")
    except ValueError:
        raise EngineError(f"vLLM ended request {request.request_id!r} with {reason!r}") from None


def _logprobs(sampling: SamplingParams, flat: Any, num_tokens: int) -> FloatArray:
    """Return (num_tokens,) log-probabilities of the sampling distribution, which for greedy has one id."""
    if is_greedy(sampling) or not num_tokens:
        # vLLM reports the log-probability among all ids here.
        return np.zeros(num_tokens, np.float32)
    # With `logprobs=0` each position has the sampled id alone.
    return clip_logprobs(flat.logprobs)


def _version_spans(spans: Iterable[Any]) -> list[VersionSpan]:
    """Convert vLLM's `WeightVersionSpan`s, whose versions are texts."""
    return [(int(span.version), span.start, span.end) for span in spans]


def as_prompt(token_ids: Sequence[int] | TokenArray) -> dict[str, Any]:
    """Return a context as vLLM's rendered input, which skips the tokenizer."""
    return {"type": "token", "prompt_token_ids": np.asarray(token_ids).tolist()}
