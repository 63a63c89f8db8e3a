"""
Calls of an actor that start in the order in which its caller made them.

Ray starts the calls of an asyncio actor in any order: arguments above 100 KB travel through the object store, so a
later call with small ones arrives first. Calls whose order matters therefore have numbers. The caller counts them for
each actor, and an actor that restarts is another one, with its own count. This module does not depend on Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from attrs import define, field

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", bound="OrderedActor")


class RemoteMethod(Protocol):
    """A method of an actor in another process."""

    def remote(self, *arguments: object) -> Awaitable[Any]: ...

    def options(self, *, num_returns: int) -> RemoteMethod: ...


class ActorHandle(Protocol):
    """An actor in another process, as its callers see it."""

    def __getattr__(self, name: str) -> RemoteMethod: ...


def post(method: RemoteMethod, *arguments: object) -> None:
    """
    Call a method of an actor without waiting for it; it may start before earlier calls.

    A call of a dead actor is dropped: only the task that watches the actor handles its death.
    """
    method.options(num_returns=0).remote(*arguments)


@define(eq=False)
class OrderedCalls:
    """
    The calls of one caller to the methods of one actor that are `in_order`.

    Attributes:
        num_calls: so far.
    """

    num_calls: int = field(default=0, init=False)

    def post(self, method: RemoteMethod, *arguments: object) -> None:
        """Call a method without waiting for it, as `post` does."""
        post(method, self.num_calls, *arguments)
        self.num_calls += 1  # not for a call that could not be sent: later ones would wait for it

    def ask(self, method: RemoteMethod, *arguments: object) -> Awaitable[Any]:
        """Call a method, and return its reply."""
        reply = method.remote(self.num_calls, *arguments)
        self.num_calls += 1
        return reply


@define(eq=False)
class CallOrder:
    """Lets the calls of one caller start in the order of their numbers, from 0 on, in whatever order they arrive."""

    _next: int = field(default=0, init=False)
    _turns: dict[int, asyncio.Future[None]] = field(factory=dict, init=False)

    @property
    def num_waiting(self) -> int:
        """Calls that wait for an earlier one."""
        return len(self._turns)

    async def wait(self, number: int) -> None:
        """
        Wait until all earlier calls have started; up to its own first wait, the caller runs before any later call.

        Raises:
            ValueError: a call with this number came before.
        """
        if number < self._next or number in self._turns:
            raise ValueError(f"call {number} came twice")
        if number > self._next:
            turn = self._turns[number] = asyncio.get_running_loop().create_future()
            await turn
        self._next += 1
        if later := self._turns.pop(self._next, None):
            later.set_result(None)  # its task continues in a later pass of the event loop


class OrderedActor:
    """An actor with methods that are `in_order`."""

    @cached_property
    def call_order(self) -> CallOrder:
        """The order of the calls of the driver."""
        return CallOrder()


def in_order(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[A, int, P], Coroutine[Any, Any, T]]:
    """
    Let a method of an actor start after all earlier calls of the driver to such methods.

    Its first argument becomes the number of the call, which `OrderedCalls` adds.
    """

    @wraps(method)
    async def run(self: A, number: int, /, *arguments: P.args, **options: P.kwargs) -> T:
        await self.call_order.wait(number)
        return await method(self, *arguments, **options)

    # Ray reads the parameters of a method, and would find those without the number.
    del run.__wrapped__
    return run
