"""
The door of a session: whether it is open, what holds while a call is inside, and who is told of calls.

A listener is told at once, on the session's event loop. Its failure ends the session, and with it the episode, because
a file of requests that lacks a call has no use, and must not look whole. The other listeners are told all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext

import structlog
from attrs import define, field

from turnwise import Trajectory
from turnwise.errors import InfrastructureError, describe
from turnwise_gateway.calls import CallRefusedError, ForwardedCall, ModelCall
from turnwise_gateway.session.delivery import Outcome
from turnwise_gateway.session.records import SampledTurn


class SessionListener:
    """
    Is told what happens in a session. All methods do nothing by default.

    Calls have numbers from 0, in the order in which they came.
    """

    def on_call(self, number: int, call: ModelCall) -> None:
        """Take note of a call, for which nothing was done yet."""

    def on_answer(self, number: int, turn: SampledTurn) -> None:
        """Take note that a call has a turn, which may be one of an earlier call."""

    def on_refused(self, number: int, refusal: CallRefusedError) -> None:
        """Take note that a call has no answer."""

    def on_left(self, number: int) -> None:
        """Take note that the client of a call left before there was an answer."""

    def on_kept(self, number: int, record: Trajectory) -> None:
        """Take note that the sampling of a call continues without a client, behind the tokens of a record."""

    def on_outcome(self, number: int, outcome: Outcome) -> None:
        """Take note of what became of the answer to a call, before the session acts on it."""

    def on_forwarded(self, call: ForwardedCall) -> None:
        """Take note of a call that another server has answered; it has no number."""

    def on_read(self, turn_id: str) -> None:
        """Take note that a score has named a turn, before the session acts on it."""

    def on_close(self, *, is_trained: bool) -> None:
        """Take note that the session is over, and its records are described."""


@define(eq=False)
class SessionDoor:
    """
    The way into a session.

    Attributes:
        fail: ends the session with an error.
        changed: set when a call comes in or goes out.
        hold: entered around each call of the model and of a tool; it may end the session, or refuse the call.
        listeners: told in this order.
        ended: set by `end`; from then on calls are refused, without a trace.
        num_inside: calls that are being answered.
    """

    fail: Callable[[Exception], None]
    changed: asyncio.Event
    hold: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    listeners: list[SessionListener] = field(factory=list, init=False)
    ended: asyncio.Event = field(factory=asyncio.Event, init=False)
    num_inside: int = field(default=0, init=False)
    _num_calls: int = field(default=0, init=False)

    def end(self) -> None:
        """Refuse further calls, without a count and without news to listeners; calls inside continue."""
        self.ended.set()

    def check_open(self) -> None:
        """Refuse a call after the end."""
        if self.ended.is_set():
            raise CallRefusedError("session_closed", "the session has ended")

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Hold what a call needs, such as a lease; `CallRefusedError` after the end."""
        self.check_open()
        async with self.hold():
            self.check_open()  # a lease may turn out to be over when it is renewed
            yield

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count a call as one that is being answered."""
        self.num_inside += 1
        self.changed.set()
        try:
            yield
        finally:
            self.num_inside -= 1
            self.changed.set()

    @contextmanager
    def follow(self, call: ModelCall) -> Iterator[int]:
        """Tell the start of a call, and its end unless it has an answer; the value is the number of the call."""
        number = self._num_calls
        self._num_calls += 1
        self.tell(lambda each: each.on_call(number, call))
        try:
            yield number
        except CallRefusedError as error:
            refusal = error  # the name of the clause is not bound in functions that are called later
            self.tell(lambda each: each.on_refused(number, refusal))
            raise
        except BaseException:
            self.tell(lambda each: each.on_left(number))
            raise

    def tell_refused(self, call: ModelCall, refusal: CallRefusedError) -> None:
        """Tell of a call that was refused before it came here."""
        number = self._num_calls
        self._num_calls += 1
        self.tell(lambda each: each.on_call(number, call))
        self.tell(lambda each: each.on_refused(number, refusal))

    def tell(self, tell_one: Callable[[SessionListener], None]) -> None:
        """Tell each listener. Never raises."""
        for listener in self.listeners:
            try:
                tell_one(listener)
            except Exception as error:  # noqa: BLE001 - it ends the session, and its agent reports it
                structlog.get_logger().warning("a listener of a session failed", error=repr(error))
                self.fail(InfrastructureError(f"a listener of the session failed: {describe(error)}"))

    def tell_outcome(self, number: int, outcome: Outcome) -> None:
        """Tell what became of the answer to a call. Never raises."""
        self.tell(lambda each: each.on_outcome(number, outcome))
