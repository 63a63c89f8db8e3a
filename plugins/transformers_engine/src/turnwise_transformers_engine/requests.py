"""A request between `generate` and its answer: what has come back of it, under which weights, and who waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from attrs import define, field

from turnwise.types import FinishReason, GenerateRequest, GenerateResult, TokenArray


@define(eq=False)
class Pending:
    """
    One request in flight. It lives on the event loop; only `num_cached_tokens` is set by the manager's thread.

    Attributes:
        request: what was asked.
        handle: the manager's name for it, never used twice: a late cancel cannot hit a later request of the same id.
        ended: resolves when it has ended, early or not.
        output: the manager's latest word: all tokens so far, and their log-probabilities.
        spans: index of the first token of each weight version, and the version.
        num_cached_tokens: tokens of the context that were found in the cache.
        read: resolves when its context has been read, or will not be; None for one that others do not wait for.
    """

    request: GenerateRequest
    handle: str
    ended: asyncio.Future[bool]
    spans: list[tuple[int, int]]
    output: Any = None
    num_cached_tokens: int = 0
    read: asyncio.Future[None] | None = None

    @property
    def num_sampled(self) -> int:
        """Tokens that have come back."""
        return 0 if self.output is None else len(self.output.generated_tokens)

    def bring(self, output: Any) -> None:
        """Take the manager's latest word."""
        self.output = output
        self.let_go()
        if output.is_finished():
            self.end(aborted=False)

    def let_go(self) -> None:
        """Let those go on that wait for the context to be read."""
        if self.read is not None and not self.read.done():
            self.read.set_result(None)

    def end(self, *, aborted: bool) -> None:
        """Let `generate` answer with what has come back."""
        if not self.ended.done():
            self.ended.set_result(aborted)

    def fail(self, error: Exception) -> None:
        """Let `generate` raise."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def begin_version(self, version: int) -> None:
        """Count the tokens from here on to other weights."""
        if self.spans[-1][0] == self.num_sampled:
            self.spans.pop()
        self.spans.append((self.num_sampled, version))

    def result(self, *, aborted: bool) -> GenerateResult:
        """Return the answer."""
        token_ids = np.array([] if self.output is None else self.output.generated_tokens, np.int32)
        logprobs = np.array([] if self.output is None else self.output.logprobs, np.float32)
        last = int(token_ids[-1]) if len(token_ids) else None
        stopped = not aborted and last in self.request.sampling.stop_token_ids
        reason = FinishReason.ABORT if aborted else FinishReason.STOP if stopped else FinishReason.LENGTH
        return GenerateResult(
            token_ids=token_ids,
            # The softmax of a sure token may round to a little over 1.
            logprobs=np.minimum(logprobs, 0.0),
            finish_reason=reason,
            stop_reason=last if stopped else None,
            weight_version=self._versions(len(token_ids)),
            num_cached_tokens=min(self.num_cached_tokens, len(self.request.token_ids)),
        )

    def _versions(self, num_tokens: int) -> int | TokenArray:
        spans = [span for span in self.spans if span[0] < num_tokens] or self.spans[:1]
        if len(spans) == 1:
            return spans[0][1]
        starts = [start for start, _ in spans] + [num_tokens]
        return np.repeat(np.array([version for _, version in spans], np.int32), np.diff(starts))


@define(eq=False)
class Reads:
    """
    Contexts that are being read now: a GRPO group asks for one prompt many times at once.

    Only what has been read is shared, so the others wait for the first, a step or two, and find its pages.

    Attributes:
        page_size: tokens; there is nothing to share in a context that fills no page.
    """

    page_size: int
    _by_context: dict[bytes, asyncio.Future[None]] = field(factory=dict)

    async def wait(self, pending: Pending) -> None:
        """Return when the request is the one to read its context, when another has read it, or when it has ended."""
        context = pending.request.token_ids
        if len(context) <= self.page_size:
            return
        key = context.tobytes()
        read = self._by_context.get(key)
        if read is not None and not read.done():
            await asyncio.wait((read, pending.ended), return_when=asyncio.FIRST_COMPLETED)
            return
        own = self._by_context[key] = pending.read = pending.ended.get_loop().create_future()

        def forget(_read: asyncio.Future[None]) -> None:
            if self._by_context.get(key) is own:
                del self._by_context[key]

        own.add_done_callback(forget)
