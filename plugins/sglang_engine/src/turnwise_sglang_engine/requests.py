"""Requests and results in SGLang's terms, as plain data: SGLang is not imported."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.types import FinishReason, FloatArray, GenerateRequest, GenerateResult, SamplingParams
from turnwise_engine_support.requests import check_context, check_grammar, is_greedy, num_new_tokens
from turnwise_engine_support.results import clip_logprobs, weight_versions
from turnwise_moe_routes.shapes import COLUMN, Routes, RouteShape
from turnwise_sglang_engine.frames import Frame

PENALTIES = frozenset({"frequency_penalty", "presence_penalty", "repetition_penalty"})
SAMPLING_OPTIONS = frozenset({"min_new_tokens"}) | PENALTIES
"""Sampling parameters of SGLang that a request may add."""
_LATE = "SGLang applies it a token late; set engine.engine_args.disable_overlap_schedule to true"
_NOT_REPORTED = "SGLang's log-probabilities do not include it"

GREEDY, PLAIN, FILTERED = "greedy", "plain", "filtered"
"""How a token is sampled: the best id, one of all ids, or one of the ids that top-k and top-p leave."""


def sampling_support(engine_args: Mapping[str, object]) -> dict[str, Any]:
    """
    Return the capabilities `sampling_options` and `refused_options` of an engine with other arguments of SGLang.

    SGLang prepares a step while the one before runs, and then a penalty does not count the newest token: in version
    0.5.23 each token of a greedy sample with a presence penalty of 2 came twice.
    """
    late = () if engine_args.get("disable_overlap_schedule") else PENALTIES
    refused = {"min_p": _NOT_REPORTED, **dict.fromkeys(sorted(late), _LATE)}
    return {"sampling_options": SAMPLING_OPTIONS - refused.keys(), "refused_options": refused}


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
        EngineError: SGLang would refuse the request, truncate it silently, or crash.
    """
    check_context(request, max_context=max_context, vocab_size=vocab_size, reads_pictures=reads_pictures)
    if request.sampling.stop and not stop_strings:
        raise EngineError(
            "the sglang engine has no tokenizer, which stop strings need: set its option stop_strings, or use"
            " stop_token_ids"
        )
    if request.grammar is not None:
        if not grammars:
            raise EngineError("the sglang engine has no grammars: set its option grammars")
        check_grammar(request, "min_new_tokens")
    return num_new_tokens(request, max_context)


def sampling_method(sampling: SamplingParams, vocab_size: int) -> str:
    """Return `GREEDY`, `PLAIN` or `FILTERED`."""
    if is_greedy(sampling):
        return GREEDY
    return FILTERED if sampling.top_p < 1 or 0 < sampling.top_k < vocab_size else PLAIN


def sampling_options(sampling: SamplingParams, max_tokens: int, vocab_size: int, *, seeds: bool) -> dict[str, Any]:
    """
    Return SGLang's sampling parameters.

    SGLang's `ignore_eos` also disables the request's own stop ids, so it is set only for requests without any. With
    stop ids, the model's end-of-turn ids end a turn as well, and the server continues it if the request does not name
    them.
    """
    method = sampling_method(sampling, vocab_size)
    options: dict[str, object] = {
        "max_new_tokens": max_tokens,
        "temperature": 0.0 if method == GREEDY else float(sampling.temperature),
        "ignore_eos": not sampling.stop_token_ids,
        "stop_token_ids": list(sampling.stop_token_ids),
        # A stop string may contain the text of a special token.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if method == FILTERED:
        options["top_p"] = float(sampling.top_p)
        # SGLang reports which ids survive the filters only for a finite top-k.
        options["top_k"] = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
    if sampling.stop:
        options["stop"] = list(sampling.stop)
    if seeds and sampling.seed is not None:
        options["sampling_seed"] = sampling.seed
    return {**options, **sampling.extra}


def generate_head(
    request: GenerateRequest, handle: int, options: Mapping[str, object], *, vocab_size: int, routes: bool
) -> dict[str, Any]:
    """
    Return the head of a request's frame, without its pictures.

    Args:
        request: the request.
        handle: names the request in frames.
        options: of `sampling_options`.
        vocab_size: number of ids of the model.
        routes: whether the experts of its tokens are returned.
    """
    head = {
        "op": "generate",
        "id": handle,
        "method": sampling_method(request.sampling, vocab_size),
        "options": options,
        "stream": request.on_tokens is not None,
        "routes": routes,
    }
    if (grammar := request.grammar) is not None:
        head["grammar"] = [grammar.text, grammar.num_read]
    return head


def parse_result(
    request: GenerateRequest, frame: Frame, *, version: int, routes: RouteShape | None = None
) -> GenerateResult:
    """
    Return the result that a frame of the server contains.

    Args:
        request: the request.
        frame: with `reason`, `stop`, `num_cached_tokens` and `spans` of weight versions in its head. Its arrays are the
            ids, unless the request is greedy their log-probabilities, and last the experts if they are returned.
        version: current weight version, for a result without tokens.
        routes: sizes of the experts that the result has; None if it has none.

    Raises:
        EngineError: the experts do not fit the tokens.
    """
    token_ids = np.asarray(frame.arrays[0], np.int32)
    reason = FinishReason(frame.head["reason"])
    return GenerateResult(
        token_ids=token_ids,
        logprobs=_logprobs(frame.arrays[1 : len(frame.arrays) - (routes is not None)], len(token_ids)),
        finish_reason=reason,
        stop_reason=frame.head["stop"] if reason.has_stop else None,
        weight_version=weight_versions(frame.head["spans"], len(token_ids), version),
        num_cached_tokens=min(frame.head["num_cached_tokens"], len(request.token_ids)),
        columns=None if routes is None else {COLUMN: _routes(request, frame, routes)},
    )


def _routes(request: GenerateRequest, frame: Frame, shape: RouteShape) -> Routes:
    """Return (n, layers, top_k) experts of context and output; an aborted request may have none."""
    num_tokens = len(request.token_ids) + len(frame.arrays[0])
    flat = np.asarray(frame.arrays[-1])
    if flat.size % (shape.num_layers * shape.top_k):
        raise EngineError(f"SGLang returned {flat.size} routed experts for {shape.num_layers} times {shape.top_k}")
    found = flat.reshape(-1, shape.num_layers, shape.top_k)
    if frame.head["reason"] == FinishReason.ABORT:
        found = found[:num_tokens]  # the service has dropped ids without a log-probability, which SGLang has run
    return shape.pad(found, num_tokens, "SGLang")


def empty_result(version: int) -> GenerateResult:
    """Return the result of a request that was aborted before its first token."""
    return GenerateResult(token_ids=[], logprobs=[], finish_reason=FinishReason.ABORT, weight_version=version)


def _logprobs(given: Sequence[Any], num_tokens: int) -> FloatArray:
    """Return (num_tokens,) log-probabilities, which are 0 for a greedy request, whose frame has none."""
    return clip_logprobs(given[0]) if given else np.zeros(num_tokens, np.float32)


@define(eq=False)
class PendingCall:
    """A request or a control call in flight, and the future of its reply."""

    handle: int
    reply: asyncio.Future[Frame]
    request: GenerateRequest | None = field(default=None)

    def hear(self, frame: Frame) -> None:
        """Tell the listener of the request the ids that have been sampled since the last call."""
        if self.request is not None and self.request.on_tokens is not None:
            self.request.on_tokens(frame.arrays[0].tolist())

    def fail(self, error: Exception) -> None:
        """Raise the error in the waiting task."""
        if not self.reply.done():
            self.reply.set_exception(error)
            # Marks the error as retrieved: if the waiter was cancelled too, asyncio would log it.
            self.reply.exception()
