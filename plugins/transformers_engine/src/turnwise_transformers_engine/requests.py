"""Requests in flight: received output, weight versions, and deduplication of prefills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from attrs import define, field

from turnwise.types import FinishReason, GenerateRequest, GenerateResult
from turnwise_engine_support.grammars import TurnGrammar
from turnwise_engine_support.results import VersionStart, clip_logprobs, version_spans, weight_versions
from turnwise_moe_routes.shapes import COLUMN
from turnwise_transformers_engine.routes import RequestRoutes

_LISTEN_S: Final = 0.02
"""Seconds between two looks at the tokens of a request that has a listener."""


@define(eq=False)
class Pending:
    """
    One request in flight. It belongs to the event loop; a decoder's thread may set `num_cached_tokens`, and append to
    `output` and `spans`.

    Attributes:
        request: the request.
        handle: the backend's id for it. Each is used once, so that a late cancel cannot hit a later request with the
            same request id.
        ended: resolves when the request has ended; true if it was aborted.
        output: the backend's latest output: all tokens so far, and their log-probabilities.
        spans: index of the first token of each weight version, and the version; a decoder appends to it.
        num_cached_tokens: context tokens found in the prefix cache.
        prefilled: resolves when the context has been prefilled, or will not be; None if no other request waits for it.
        grammar: state of its grammar; None if it has none.
        routes: of its tokens; None if the engine does not return them.
    """

    request: GenerateRequest
    handle: str
    ended: asyncio.Future[bool]
    output: Any = None
    spans: list[VersionStart] = field(factory=list)
    num_cached_tokens: int = 0
    prefilled: asyncio.Future[None] | None = None
    grammar: TurnGrammar | None = None
    routes: RequestRoutes | None = None

    @property
    def num_sampled(self) -> int:
        """Number of tokens received."""
        return 0 if self.output is None else len(self.output.generated_tokens)

    def on_output(self, output: Any, version: int) -> None:
        """Store the backend's latest output, whose new token a weight version has sampled."""
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((self.num_sampled, version))
        self.output = output
        self.release_waiters()
        if output.is_finished():
            self.end(aborted=False)

    async def follow(self, on_tokens: Callable[[Sequence[int]], object]) -> bool:
        """Pass the ids on while they are sampled, and return whether the request was aborted."""
        num_heard = 0
        # The decoders' threads tell the event loop of the end alone: to wake it for each token would cost them more.
        try:
            while not (await asyncio.wait((self.ended,), timeout=_LISTEN_S))[0]:
                if new := self._sampled_ids()[num_heard:]:
                    num_heard += len(new)
                    on_tokens(new)
        except asyncio.CancelledError:
            self.ended.cancel()  # asyncio reports a failure that no one awaits
            raise
        return await self.ended

    def release_waiters(self) -> None:
        """Wake the requests that wait for this prefill."""
        if self.prefilled is not None and not self.prefilled.done():
            self.prefilled.set_result(None)

    def end(self, *, aborted: bool) -> None:
        """Let `generate` return the tokens received so far."""
        if not self.ended.done():
            self.ended.set_result(aborted)

    def fail(self, error: Exception) -> None:
        """Let `generate` raise."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def result(self, *, aborted: bool, version: int) -> GenerateResult:
        """Return the result of the request; a result without tokens has `version`."""
        token_ids = np.array(self._sampled_ids(), np.int32)
        logprobs = [] if self.output is None else self.output.logprobs[: len(token_ids)]
        last = int(token_ids[-1]) if len(token_ids) else None
        stopped = not aborted and last in self.request.sampling.stop_token_ids
        num_tokens = len(self.request.token_ids) + len(token_ids)
        reason = FinishReason.ABORT if aborted else FinishReason.STOP if stopped else FinishReason.LENGTH
        return GenerateResult(
            token_ids=token_ids,
            logprobs=clip_logprobs(logprobs),
            finish_reason=reason,
            stop_reason=last if stopped else None,
            weight_version=weight_versions(version_spans(self.spans, len(token_ids)), len(token_ids), version),
            num_cached_tokens=min(self.num_cached_tokens, len(self.request.token_ids)),
            columns=None if self.routes is None else {COLUMN: self.routes.column(num_tokens)},
        )

    def _sampled_ids(self) -> list[int]:
        # A decoder's thread may append a token meanwhile, and its log-probability last.
        return [] if self.output is None else list(self.output.generated_tokens[: len(self.output.logprobs)])


@define(eq=False)
class PrefillDeduplicator:
    """
    Lets one of several concurrent requests with the same context prefill it, as a GRPO group sends them.

    The prefix cache shares only prefilled pages, so the other requests wait a step or two for the first one.

    Attributes:
        page_size: tokens of a page; a context that fills no page has nothing to share.
    """

    page_size: int
    _by_context: dict[bytes, asyncio.Future[None]] = field(factory=dict)

    async def wait(self, pending: Pending) -> None:
        """Return if the request has to prefill its context, if another request has prefilled it, or if it has ended."""
        context = pending.request.token_ids
        if len(context) <= self.page_size:
            return
        key = context.tobytes()
        prefilled = self._by_context.get(key)
        if prefilled is not None and not prefilled.done():
            await asyncio.wait((prefilled, pending.ended), return_when=asyncio.FIRST_COMPLETED)
            return
        # No await between the lookup and this line, so each context has one prefilling request.
        own = self._by_context[key] = pending.prefilled = pending.ended.get_loop().create_future()

        def forget(_done: asyncio.Future[None]) -> None:
            # A later request may have registered the same context before this callback runs.
            if self._by_context.get(key) is own:
                del self._by_context[key]

        own.add_done_callback(forget)
