"""
The protocols of vLLM and SGLang servers: request bodies, and the interpretation of responses.

A vLLM server streams its response, so an aborted request keeps the tokens received before the connection was closed. An
SGLang server ends a request on a call with its id, and then returns the tokens it has.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

from attrs import frozen

from turnwise.types import GenerateRequest
from turnwise_openai_engine.output import BadOutputError, Output, ServerFailure, parse_version


class Dialect(Protocol):
    """The protocol of one kind of server."""

    @property
    def path(self) -> str:
        """The path of generation requests."""

    @property
    def sampling_options(self) -> frozenset[str]:
        """Names that `SamplingParams.extra` may have; the servers ignore unknown ones in silence."""

    def body(self, request: GenerateRequest, wire_id: str, max_tokens: int | None) -> dict[str, Any]:
        """Return the JSON body of a request."""

    async def read(self, lines: AsyncIterator[bytes], output: Output) -> None:
        """Add the lines of a response to the output; raises `BadOutputError` and `ServerFailure`."""

    def abort(self, wire_id: str) -> tuple[str, dict[str, Any]] | None:
        """Return path and body of the call that ends a request; None if closing its connection ends it."""


@frozen
class VllmDialect:
    """
    `/v1/completions` of vLLM 0.32.

    Attributes:
        model: the server's name of its model.
    """

    model: str
    path: str = "/v1/completions"
    sampling_options: frozenset[str] = frozenset(
        {"frequency_penalty", "min_p", "min_tokens", "presence_penalty", "repetition_penalty"}
    )

    def body(self, request: GenerateRequest, wire_id: str, max_tokens: int | None) -> dict[str, Any]:
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
            **sampling.extra,
        }

    async def read(self, lines: AsyncIterator[bytes], output: Output) -> None:
        """Read server-sent events until `[DONE]`."""
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            self._add_event(_parse_json(data), output)
        raise ServerFailure("the server ended its response too early")

    def abort(self, wire_id: str) -> None:
        """Return None: closing the connection ends a request."""

    @staticmethod
    def _add_event(event: Any, output: Output) -> None:
        if "error" in event:
            raise ServerFailure(f"the server failed: {_error_text(event['error'])}")
        for choice in event.get("choices", ()):
            if choice.get("finish_reason"):
                output.finish_reason, output.stop_reason = choice["finish_reason"], choice.get("stop_reason")
            logprobs = choice.get("logprobs") or {}
            token_ids = choice.get("token_ids")
            if token_ids or not choice.get("finish_reason"):
                output.extend(token_ids, logprobs.get("token_logprobs"))
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        output.num_cached_tokens = details.get("cached_tokens") or output.num_cached_tokens


@frozen
class SglangDialect:
    """`/generate` of SGLang 0.5."""

    path: str = "/generate"
    # No penalties: a server applies them a token late, unless it was started with --disable-overlap-schedule.
    sampling_options: frozenset[str] = frozenset({"min_new_tokens"})

    def body(self, request: GenerateRequest, wire_id: str, max_tokens: int | None) -> dict[str, Any]:
        sampling = request.sampling
        # No `ignore_eos`, because it would disable the stop ids too. So the model's own end of turn ends a turn.
        options: dict[str, object] = {
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
        options |= sampling.extra
        return {
            "rid": wire_id,
            "input_ids": request.token_ids.tolist(),
            "sampling_params": options,
            "return_logprob": True,
        }

    async def read(self, lines: AsyncIterator[bytes], output: Output) -> None:
        """Read one JSON object."""
        body = _parse_json(b"".join([line async for line in lines]))
        meta: dict[str, Any] = body.get("meta_info") or {}
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort" and int(reason.get("status_code") or 0) >= 500:
            raise ServerFailure(f"the server failed: {_error_text(reason)}")
        if reason.get("type") == "abort" and reason.get("status_code"):
            raise BadOutputError(f"the server refused the request: {_error_text(reason)}")
        logprobs = meta.get("output_token_logprobs")
        output.extend(body.get("output_ids"), [each[0] for each in logprobs or ()])
        output.finish_reason, output.stop_reason = reason.get("type", ""), reason.get("matched")
        output.num_cached_tokens = meta.get("cached_tokens") or 0
        output.weight_version = parse_version(meta.get("weight_version", 0))
        spans = meta.get("weight_versions") or ()
        output.version_spans = tuple((parse_version(each["version"]), each["start"], each["end"]) for each in spans)

    def abort(self, wire_id: str) -> tuple[str, dict[str, Any]]:
        """Return the call that ends a request. The server aborts all ids with this prefix."""
        return "/abort_request", {"rid": wire_id}


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise BadOutputError(f"the server's response is not JSON: {data[:80]!r}") from None
    if not isinstance(value, dict):
        raise BadOutputError(f"the server's response is not a JSON object: {data[:80]!r}")
    return value


def _error_text(error: object) -> str:
    """Return one line of a server's error."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message).strip().splitlines()[0][:300] if str(message).strip() else "no text"
