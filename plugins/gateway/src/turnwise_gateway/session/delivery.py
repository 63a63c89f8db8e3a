"""
Sampled turns on their way to a client.

A turn is sampled, then delivered, and only then part of its record: a turn that nobody has read must not be trained. A
client that breaks off before gets the same turn for the same request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from attrs import define, field

from turnwise_gateway.calls import ModelReply
from turnwise_gateway.session.records import SampledTurn


@define(eq=False)
class TurnAnswer:
    """
    The `Answer` with a sampled turn.

    Attributes:
        turn: to deliver.
        deliver: makes the turn part of its record, unless it is.
        settled: called when the client has the turn or has left.
    """

    turn: SampledTurn
    deliver: Callable[[SampledTurn], None]
    settled: Callable[[], None]
    _is_settled: bool = field(default=False, init=False)

    @property
    def reply(self) -> ModelReply:
        return self.turn.reply

    def confirm(self) -> None:
        if self._settle():
            self.deliver(self.turn)

    def release(self) -> None:
        self._settle()

    def _settle(self) -> bool:
        first, self._is_settled = not self._is_settled, True
        self.turn.num_answers -= first
        self.settled()
        return first


@define(eq=False)
class SharedCall:
    """
    A call that is being sampled, and the requests that wait for it: the first one, and its retries.

    Attributes:
        outcome: the turn, or the refusal.
        cancel: ends the sampling; called when the last request has left.
    """

    outcome: asyncio.Future[SampledTurn]
    cancel: Callable[[], object] = lambda: None
    num_waiting: int = 0

    async def wait(self) -> SampledTurn:
        """Return the turn, with an answer counted; when the last request is cancelled, the sampling ends."""
        self.num_waiting += 1
        try:
            # Shielded: a request that leaves must not cancel the turn of the others.
            return await asyncio.shield(self.outcome)
        except asyncio.CancelledError:
            if self.outcome.done() and not self.outcome.cancelled() and self.outcome.exception() is None:
                self.outcome.result().num_answers -= 1  # `finish` has counted this request
            raise
        finally:
            self.num_waiting -= 1
            if self.num_waiting == 0 and not self.outcome.done():
                self.cancel()

    def finish(self, turn: SampledTurn) -> None:
        """Hand a turn to all requests that wait."""
        # Counted before they run again, so that no other call takes the record for free in between.
        turn.num_answers += self.num_waiting
        self.outcome.set_result(turn)

    def fail(self, error: Exception) -> None:
        """Raise an error in all requests that wait."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # read here, for the last request may have left
