"""Services of the driver, called in the same process and by workers that keep their calls until they are fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError, InfrastructureError
from turnwise.protocols import ServiceClient
from turnwise.runtime.service import DriverServices, RemoteServices

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


class LocalError(Exception):
    """An error whose class has other arguments than a text."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")


@define(eq=False)
class Echo:
    """A service that returns, raises or waits, and notes the calls that end early."""

    host: str = ""
    is_closed: bool = False
    cancelled: list[str] = field(factory=list)
    waiting: asyncio.Event = field(factory=asyncio.Event)
    left: asyncio.Event = field(factory=asyncio.Event)

    async def open(self, host: str) -> dict[str, str]:
        self.host = host
        return {"echo": f"http://{host}:1"}

    async def call(self, method: str, arguments: Any) -> object:
        if method == "wait":
            try:
                self.waiting.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.append(arguments["name"])
                self.left.set()
                raise
        if method == "raise":
            raise ConfigError("a key") if arguments["kind"] == "config" else LocalError(1, "no text alone")
        if method == "wrong":
            return object()
        return arguments["value"]

    async def close(self) -> None:
        self.is_closed = True


@asynccontextmanager
async def connected(where: str) -> AsyncIterator[tuple[Echo, DriverServices, ServiceClient, asyncio.Task[Any] | None]]:
    """A service and its client, and the task that answers a worker in another process."""
    service = Echo()
    driver = DriverServices({"agent": service}, "10.0.0.1")
    await driver.open()
    if where == "local":
        yield service, driver, driver.client("agent"), None
    else:
        worker = RemoteServices("10.0.0.2", "10.0.0.1")
        serving = asyncio.get_running_loop().create_task(driver.serve(worker.fetch, worker.settle))
        yield service, driver, worker.client("agent"), serving
        serving.cancel()
        await asyncio.wait([serving])
    await driver.close()


def run(where: str, work: Callable[..., Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), connected(where) as parts:
            await work(*parts)

    asyncio.run(main())


both = pytest.mark.parametrize("where", ["local", "remote"])


@both
@given(value=PLAIN)
def test_plain_data_crosses_as_a_copy(where: str, value: object) -> None:
    """The result is equal, and no list or dict of it is the caller's."""

    async def work(_service: Echo, _driver: DriverServices, client: ServiceClient, _serving: object) -> None:
        result = await client.call("echo", value=value)
        assert result == value
        assert result is not value or not isinstance(value, list | dict)

    run(where, work)


@both
def test_other_data_is_refused(where: str) -> None:
    """As an argument and as a result; the error is that of the caller."""

    async def work(_service: Echo, _driver: DriverServices, client: ServiceClient, _serving: object) -> None:
        for method, value in (("echo", object()), ("echo", {1: 2}), ("wrong", None)):
            with pytest.raises(TypeError, match="plain data"):
                await client.call(method, value=value)

    run(where, work)


@both
def test_errors_keep_their_class_and_text(where: str) -> None:
    """A class that no text can build becomes an error that names it."""

    async def work(_service: Echo, _driver: DriverServices, client: ServiceClient, _serving: object) -> None:
        with pytest.raises(ConfigError, match=r"^a key$"):
            await client.call("raise", kind="config")
        expected = LocalError if where == "local" else InfrastructureError
        with pytest.raises(expected, match="1: no text alone"):
            await client.call("raise", kind="local")

    run(where, work)


@both
def test_a_caller_that_is_cancelled_ends_its_call(where: str) -> None:
    """The service learns of it, and later calls are answered."""

    async def work(service: Echo, _driver: DriverServices, client: ServiceClient, _serving: object) -> None:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(client.call("wait", name="left"))
            await service.waiting.wait()
            waiting.cancel()
        await service.left.wait()
        assert await client.call("echo", value=1) == 1

    run(where, work)


@both
def test_the_end_of_the_driver_fails_waiting_and_later_calls(where: str) -> None:
    """With an error that says so; the service is closed, and no call runs any more."""

    async def work(service: Echo, driver: DriverServices, client: ServiceClient, _serving: object) -> None:
        assert driver.addresses == {"echo": "http://10.0.0.1:1"}
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(refused(client, "wait", name="open"))
            await service.waiting.wait()
            await driver.close()
            await waiting
        assert (service.cancelled, service.is_closed, driver.addresses) == (["open"], True, {})
        await refused(client, "echo", value=1)

    async def refused(client: ServiceClient, method: str, **arguments: object) -> None:
        with pytest.raises(InfrastructureError, match="the run ends"):
            await client.call(method, **arguments)

    run(where, work)


def test_the_death_of_a_worker_ends_its_calls_alone() -> None:
    """The calls have ended when serving has; those of another worker go on."""

    async def work(service: Echo, driver: DriverServices, client: ServiceClient, serving: Any) -> None:
        async with asyncio.TaskGroup() as group:
            other = group.create_task(driver.client("agent").call("wait", name="other"))
            await service.waiting.wait()
            service.waiting.clear()
            lost = group.create_task(client.call("wait", name="lost"))
            await service.waiting.wait()
            serving.cancel()
            await asyncio.wait([serving])
            assert service.cancelled == ["lost"]
            lost.cancel()
            other.cancel()

    run("remote", work)


def test_a_worker_that_stops_fails_its_calls() -> None:
    """It needs no answer of the driver for that."""

    async def main() -> None:
        worker = RemoteServices()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(worker.client("agent").call("echo", value=1))
            await worker.fetch()
            worker.close()
            await asyncio.wait([waiting])
            assert "the run ends" in str(waiting.exception())
            waiting.cancel()

    with pytest.raises(ExceptionGroup):
        asyncio.run(main())


def test_an_agent_without_a_service_is_named() -> None:
    """The text says that the config must name the agent."""
    with pytest.raises(InfrastructureError, match="agent 'other' has no service in the driver"):
        asyncio.run(DriverServices().client("other").call("echo"))
