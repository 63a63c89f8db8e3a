"""
The two protocols: what is posted where, and what an answer means.

A vLLM server streams, so that an aborted request keeps what it had: closing the connection ends it there. An SGLang
server is told to end a request by its id, and then answers with what it had.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from attrs import frozen

from turnwise.types import GenerateRequest
from turnwise_openai_engine.answers import Answer, BadAnswerError, ServerFailure, as_version


class Dialect(Protocol):
    """How one kind of server is spoken to."""

    @property
    def path(self) -> str:
        """Where requests go."""

    def body(self, request: GenerateRequest, wire_id: str, max_tokens: int | None) -> dict[str, Any]:
        """Return what is posted."""

    async def read(self, lines: AsyncIterator[bytes], answer: Answer) -> None:
        """Fill an answer from the lines of a response; `BadAnswerError` and `ServerFailure` as they say."""

    def abort(self, wire_id: str) -> tuple[str, dict[str, Any]] | None:
        """Return where and what to post to end a request; None when closing its connection does."""


@frozen
class VllmDialect:
    """
    `/v1/completions` of vLLM 0.32.

    Attributes:
        model: what the server calls its model.
    """

    model: str
    path: str = "/v1/completions"

    def body(self, request: GenerateRequest, wire_id: str, max_tokens: int | None) -> dict[str, Any]:
        """Return what is posted."""
        sampling = request.sampling
        return {
            "model": self.model,
            "prompt": request.token_ids.tolist(),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            # The model's own end-of-turn ids end nothing unless the request names them.
            "ignore_eos": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "request_id": wire_id,
        }

    async def read(self, lines: AsyncIterator[bytes], answer: Answer) -> None:
        """Read server-sent events up to `[DONE]`."""
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            self._take(_parsed(data), answer)
        raise ServerFailure("the server ended its answer in the middle")

    def abort(self, wire_id: str) -> None:
        """Return None: closing the connection ends a request."""

    @staticmethod
    def _take(event: Any, answer: Answer) -> None:
        if "error" in event:
            raise ServerFailure(f"the server failed: {_text(event['error'])}")
        for choice in event.get("choices", ()):
            if choice.get("finish_reason"):
                answer.finish_reason, answer.stop_reason = choice["finish_reason"], choice.get("stop_reason")
            logprobs = choice.get("logprobs") or {}
            token_ids = choice.get("token_ids")
            if token_ids or not choice.get("finish_reason"):
                answer.extend(token_ids, logprobs.get("token_logprobs"))
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        answer.num_cached_tokens = details.get("cached_tokens") or answer.num_cached_tokens


@frozen
class SglangDialect:
    """`/generate` of SGLang 0.5."""

    path: str = "/generate"

    def body(self, request: GenerateRequest, wire_id: str, max_tokens: int | None) -> dict[str, Any]:
        """Return what is posted. `ignore_eos` would switch off the stop ids too, so the model's own ends a turn."""
        sampling = request.sampling
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(sampling.stop_token_ids),
            "stop": list(sampling.stop),
            "skip_special_tokens": False,
        }
        if max_tokens is not None:
            options["max_new_tokens"] = max_tokens
        if sampling.seed is not None:
            options["sampling_seed"] = sampling.seed
        return {
            "rid": wire_id,
            "input_ids": request.token_ids.tolist(),
            "sampling_params": options,
            "return_logprob": True,
        }

    async def read(self, lines: AsyncIterator[bytes], answer: Answer) -> None:
        """Read one JSON object."""
        body = _parsed(b"".join([line async for line in lines]))
        meta: dict[str, Any] = body.get("meta_info") or {}
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort" and int(reason.get("status_code") or 0) >= 500:
            raise ServerFailure(f"the server failed: {_text(reason)}")
        if reason.get("type") == "abort" and reason.get("status_code"):
            raise BadAnswerError(f"the server refused the request: {_text(reason)}")
        logprobs = meta.get("output_token_logprobs")
        answer.extend(body.get("output_ids"), [each[0] for each in logprobs or ()])
        answer.finish_reason, answer.stop_reason = reason.get("type", ""), reason.get("matched")
        answer.num_cached_tokens = meta.get("cached_tokens") or 0
        answer.weight_version = as_version(meta.get("weight_version", 0))
        spans = meta.get("weight_versions") or ()
        answer.weight_versions = tuple((as_version(each["version"]), each["start"], each["end"]) for each in spans)

    def abort(self, wire_id: str) -> tuple[str, dict[str, Any]]:
        """Return the call that ends a request; the server looks for ids that begin with this one."""
        return "/abort_request", {"rid": wire_id}


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise BadAnswerError(f"the server's answer is no JSON: {data[:80]!r}") from None
    if not isinstance(value, dict):
        raise BadAnswerError(f"the server's answer is no JSON object: {data[:80]!r}")
    return value


def _text(error: Any) -> str:
    """Return one line of what a server says went wrong."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message).strip().splitlines()[0][:300] if str(message).strip() else "it left no word"
