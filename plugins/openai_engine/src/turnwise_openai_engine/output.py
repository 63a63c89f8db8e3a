"""What has come back of a request, and what was wrong with what came."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError, InfrastructureError
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams, TokenArray

_GREEDY_BELOW = 1e-5
"""Where both servers draw the line between drawing and taking the best id."""


class ServerFailure(InfrastructureError):  # noqa: N818 - it is about the server, as opposed to the request
    """A server, or the way to it, failed: the same request may succeed at another."""


class BadAnswerError(EngineError):
    """A server answered what cannot be used, and would again."""


def is_greedy(sampling: SamplingParams) -> bool:
    """Return whether a server takes the best id at every step."""
    return sampling.temperature < _GREEDY_BELOW


@define
class Answer:
    """
    What one attempt has brought.

    Attributes:
        token_ids: so far.
        logprobs: one for each.
        finish_reason: in the server's words; empty until it has ended.
        stop_reason: the id or string that ended it.
        num_cached_tokens: of the context.
        weight_versions: (version, start, end) of the tokens, when the server tells.
        weight_version: of all of them, when it tells only that.
    """

    token_ids: list[int] = field(factory=list)
    logprobs: list[float] = field(factory=list)
    finish_reason: str = ""
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    weight_versions: tuple[tuple[int, int, int], ...] = ()
    weight_version: int = 0

    def extend(self, token_ids: Any, logprobs: Any) -> None:
        """Take more tokens; `BadAnswerError` when the two do not fit together."""
        if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
            raise BadAnswerError("the server returned no token ids: it may be too old, or another kind of server")
        if not isinstance(logprobs, list) or len(logprobs) != len(token_ids):
            raise BadAnswerError(
                f"the server returned {len(token_ids)} token ids and no log-probability for each of them"
            )
        self.token_ids += token_ids
        self.logprobs += logprobs

    def result(self, request: GenerateRequest, *, aborted: bool) -> GenerateResult:
        """Return the engine's answer; `BadAnswerError` for an ending that is not known."""
        reason = FinishReason.ABORT if aborted else self._reason()
        num_tokens, greedy = len(self.token_ids), is_greedy(request.sampling)
        return GenerateResult(
            token_ids=np.array(self.token_ids, np.int32),
            # Greedy draws from one id, and servers tell its log-probability among all.
            logprobs=np.zeros(num_tokens) if greedy else np.minimum(np.array(self.logprobs, np.float32), 0.0),
            finish_reason=reason,
            stop_reason=self._stop_reason() if reason is FinishReason.STOP else None,
            weight_version=self._versions(),
            num_cached_tokens=min(self.num_cached_tokens, len(request.token_ids)),
        )

    def _reason(self) -> FinishReason:
        try:
            return FinishReason(self.finish_reason)
        except ValueError:
            raise BadAnswerError(f"the server ended the request with {self.finish_reason!r}") from None

    def _stop_reason(self) -> int | str | None:
        if self.stop_reason is None and self.token_ids:
            return self.token_ids[-1]
        return self.stop_reason

    def _versions(self) -> int | TokenArray:
        spans = [(version, end - start) for version, start, end in self.weight_versions if end > start]
        if len({version for version, _ in spans}) < 2:
            return spans[0][0] if spans else self.weight_version
        versions, lengths = zip(*spans, strict=True)
        array = np.repeat(np.array(versions, np.int32), lengths)
        if len(array) != len(self.token_ids):
            raise BadAnswerError(f"the server told the weights of {len(array)} of {len(self.token_ids)} tokens")
        return array


def as_version(text: Any) -> int:
    """Return a server's label of its weights as a number; 0 for one that is none, such as `default`."""
    text = str(text)
    return int(text) if text.isascii() and text.isdigit() else 0
