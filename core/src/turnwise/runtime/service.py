"""
Services of the driver that workers call.

On the local runtime a call is a call of the service. A worker in another process keeps its calls until the driver
fetches them, so a worker needs no connection to the driver that the runtime does not have anyway.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any, Final, NoReturn

from attrs import define, field, frozen

from turnwise.errors import InfrastructureError, is_cancelled
from turnwise.protocols.service import Service, ServiceClient
from turnwise.types import JsonObject

LOOPBACK: Final = "127.0.0.1"
_END_S: Final = 10.0
"""Seconds for a cancelled call to end; a service that ignores the cancellation must not hold up the run."""
_SCALARS: Final[tuple[type[Any], ...]] = (bool, int, float, str, bytes)
_CLOSED: Final = "the run ends: its driver answers no calls of workers any more"

CallService = Callable[[str, str, JsonObject], Awaitable[Any]]
"""Calls a method of the service of an agent."""


@frozen
class _Client:
    """The `ServiceClient` of one agent."""

    name: str
    host: str
    driver_host: str
    _call: CallService

    async def call(self, method: str, **arguments: object) -> Any:
        return await self._call(self.name, method, arguments)


@frozen
class ServiceCall:
    """A call on its way to the driver, or its cancellation: then there is no method."""

    number: int
    service: str = ""
    method: str = ""
    arguments: JsonObject = field(factory=dict)


@frozen
class ServiceReply:
    """The result of a call, or the module, the name and the text of its error."""

    number: int
    value: object = None
    error: tuple[str, str, str] | None = None

    @classmethod
    def failed(cls, number: int, error: Exception) -> ServiceReply:
        kind = type(error)
        return cls(number, error=(kind.__module__, kind.__qualname__, str(error)))

    def settle(self, future: asyncio.Future[Any]) -> None:
        """Give the outcome to the waiting caller."""
        if self.error is None:
            future.set_result(self.value)
        else:
            future.set_exception(_build_error(*self.error))


@define(eq=False)
class DriverServices:
    """
    The services of a run, in the driver.

    Attributes:
        services: by the name of their agent.
        host: address of this machine for the other machines of the run.
        addresses: of the services' servers, by name.
    """

    services: Mapping[str, Service] = field(factory=dict)
    host: str = LOOPBACK
    addresses: dict[str, str] = field(factory=dict, init=False)
    _opened: list[Service] = field(factory=list, init=False)
    _calls: set[asyncio.Task[object]] = field(factory=set, init=False)

    def client(self, name: str) -> ServiceClient:
        """Return the client of a service for an agent in this process."""
        return _Client(name, self.host, self.host, self.call)

    async def open(self) -> None:
        """Open every service."""
        for service in self.services.values():
            self._opened.append(service)  # before it opens, because a failed one is closed too
            self.addresses.update({**await service.open(self.host), **self.addresses})

    async def close(self) -> None:
        """Fail the calls that wait, refuse later ones, and close every service; a second call does nothing."""
        opened, self._opened = self._opened, []
        await _end(self._calls)
        self.addresses.clear()
        while opened:
            await opened.pop().close()

    async def call(self, name: str, method: str, arguments: JsonObject) -> Any:
        """Call a service; errors as in `ServiceClient.call`."""
        service = self.services.get(name)
        if service is None:
            raise InfrastructureError(f"agent {name!r} has no service in the driver: name it in the config")
        if service not in self._opened:
            raise InfrastructureError(_CLOSED)
        # A task of its own, so that `close` can end it although its caller is not cancelled.
        work = asyncio.get_running_loop().create_task(_answer(service, method, arguments))
        self._calls.add(work)
        work.add_done_callback(self._calls.discard)
        try:
            return _copy(await work)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise InfrastructureError(_CLOSED) from None

    async def serve(
        self, fetch: Callable[[], Awaitable[list[ServiceCall]]], reply: Callable[[ServiceReply], None]
    ) -> NoReturn:
        """
        Answer the calls of a worker until this is cancelled, or `fetch` raises because the worker is dead.

        Before it returns, the calls of the worker have ended: its episodes run again elsewhere next.
        """
        running: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                for call in await fetch():
                    if call.method:
                        task = asyncio.get_running_loop().create_task(self._run(call, reply))
                        running[call.number] = task
                        task.add_done_callback(partial(_forget, running, call.number))
                    elif call.number in running:
                        running[call.number].cancel()
        finally:
            await _end(running.values())  # under 10 s, also if a service ignores the cancellation

    async def _run(self, call: ServiceCall, reply: Callable[[ServiceReply], None]) -> None:
        try:
            reply(ServiceReply(call.number, await self.call(call.service, call.method, call.arguments)))
        except Exception as error:  # noqa: BLE001 - raised again where the worker waits
            reply(ServiceReply.failed(call.number, error))


@define(eq=False)
class RemoteServices:
    """
    The services of a run in the process of a worker, which keeps its calls until the driver fetches them.

    Attributes:
        host: address of this machine for the other machines of the run.
        driver_host: address of the driver's machine, in the same form.
    """

    host: str = LOOPBACK
    driver_host: str = LOOPBACK
    _numbers: itertools.count[int] = field(factory=itertools.count, init=False)
    _waiting: dict[int, asyncio.Future[Any]] = field(factory=dict, init=False)
    _outbox: list[ServiceCall] = field(factory=list, init=False)
    _any: asyncio.Event = field(factory=asyncio.Event, init=False)
    _is_closed: bool = field(default=False, init=False)

    def client(self, name: str) -> ServiceClient:
        """Return the client of a service."""
        return _Client(name, self.host, self.driver_host, self.call)

    async def call(self, name: str, method: str, arguments: JsonObject) -> Any:
        """Call a service of the driver; errors as in `ServiceClient.call`."""
        if self._is_closed:
            raise InfrastructureError(_CLOSED)
        number = next(self._numbers)
        self._send(ServiceCall(number, name, method, _copy(arguments)))
        self._waiting[number] = reply = asyncio.get_running_loop().create_future()
        try:
            return await reply
        except asyncio.CancelledError:
            self._send(ServiceCall(number))
            raise
        finally:
            del self._waiting[number]

    async def fetch(self) -> list[ServiceCall]:
        """Wait for calls, and return all that the driver has not got yet."""
        await self._any.wait()
        self._any.clear()
        calls, self._outbox = self._outbox, []
        return calls

    def settle(self, reply: ServiceReply) -> None:
        """Give a reply to its caller, unless that has left."""
        if (waiting := self._waiting.get(reply.number)) is not None and not waiting.done():
            reply.settle(waiting)

    def close(self) -> None:
        """Fail the calls that wait, and refuse later ones."""
        self._is_closed = True
        for number in self._waiting:
            self.settle(ServiceReply.failed(number, InfrastructureError(_CLOSED)))

    def _send(self, call: ServiceCall) -> None:
        self._outbox.append(call)
        self._any.set()


def _forget(running: dict[int, asyncio.Task[None]], number: int, _done: asyncio.Task[None]) -> None:
    del running[number]


async def _answer(service: Service, method: str, arguments: JsonObject) -> object:
    return await service.call(method, _copy(arguments))


async def _end(tasks: Any) -> None:
    """Cancel tasks and wait for their end."""
    for task in (ending := list(tasks)):
        task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=_END_S)


def _copy(value: object) -> Any:
    """Return a copy of plain data; `TypeError` for anything else. Local calls copy too, as processes would."""
    for kind in _SCALARS:
        if isinstance(value, kind):
            return kind(value)  # a subclass, such as that of an enumeration, may be unknown to the receiver
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [_copy(each) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _copy(each) for key, each in value.items()}
    raise TypeError(f"a service takes and returns plain data, and not {type(value).__name__}")


def _build_error(module: str, name: str, text: str) -> Exception:
    """Return an error of the class and text that the service raised; this process may lack the class."""
    try:
        kind = attrgetter(name)(import_module(module))
        error = kind(text)
    except Exception:  # noqa: BLE001 - a class of a function, or one with other arguments
        return InfrastructureError(f"{name}: {text}")
    return error if isinstance(error, Exception) else InfrastructureError(f"{name}: {text}")
