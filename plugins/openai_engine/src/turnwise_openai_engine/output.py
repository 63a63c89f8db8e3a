"""The output of a server for one request, and errors about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError, InfrastructureError
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, TokenArray
from turnwise_engine_support.requests import is_greedy
from turnwise_engine_support.results import VersionSpan, clip_logprobs, weight_versions


class ServerFailure(InfrastructureError):  # noqa: N818 - the server failed, and the request is not an error
    """A server or the connection to it failed. The same request may succeed on another server."""


class BadOutputError(EngineError):
    """A server's response cannot be used, and a retry would give the same."""


@define
class Output:
    """
    The output of one attempt.

    Attributes:
        token_ids: received so far.
        logprobs: one for each id.
        finish_reason: in the server's words; empty while the attempt runs.
        stop_reason: the id or string that ended it.
        num_cached_tokens: context tokens found in the server's prefix cache.
        version_spans: weight versions of the tokens, if the server reports them.
        weight_version: of all tokens, if the server reports only that.
        on_tokens: called with new ids; None for no listener.
    """

    token_ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    version_spans: tuple[VersionSpan, ...] = ()
    weight_version: int = 0
    on_tokens: Callable[[Sequence[int]], object] | None = None

    def extend(self, token_ids: object, logprobs: object) -> None:
        """Append tokens; `BadOutputError` if ids or log-probabilities are missing."""
        if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
            raise BadOutputError("the server returned no token ids: it may be too old, or not a vLLM or SGLang server")
        if not isinstance(logprobs, list) or len(logprobs) != len(token_ids):
            raise BadOutputError(
                f"the server returned {len(token_ids)} token ids, but not one log-probability for each"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        if self.on_tokens is not None:
            self.on_tokens(token_ids)

    def result(self, request: GenerateRequest, *, aborted: bool) -> GenerateResult:
        """Return the result of the request; `BadOutputError` for an unknown finish reason."""
        reason = FinishReason.ABORT if aborted else self._finish_reason()
        num_tokens, greedy = len(self.token_ids), is_greedy(request.sampling)
        return GenerateResult(
            token_ids=np.array(self.token_ids, np.int32),
            # For greedy requests servers report the log-probability among all ids.
            logprobs=np.zeros(num_tokens) if greedy else clip_logprobs(self.logprobs),
            finish_reason=reason,
            stop_reason=self._stop_reason() if reason.has_stop else None,
            weight_version=self._versions(),
            num_cached_tokens=min(self.num_cached_tokens, len(request.token_ids)),
        )

    def _finish_reason(self) -> FinishReason:
        try:
            return FinishReason(self.finish_reason)
        except ValueError:
            raise BadOutputError(f"the server ended the request with {self.finish_reason!r}") from None

    def _stop_reason(self) -> int | str | None:
        if self.stop_reason is None and self.token_ids:
            return self.token_ids[-1]
        return self.stop_reason

    def _versions(self) -> int | TokenArray:
        if not self.version_spans:
            return self.weight_version
        try:
            return weight_versions(self.version_spans, len(self.token_ids), self.weight_version)
        except EngineError as error:
            raise BadOutputError(f"the server reported wrong weight versions: {error}") from error


def parse_version(label: object) -> int:
    """Return a server's label of its weights as a number; 0 for a label that is none, such as `default`."""
    text = str(label)
    return int(text) if text.isascii() and text.isdigit() else 0
