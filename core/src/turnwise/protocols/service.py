"""The part of an agent that lives in the driver, and the calls that its workers send there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from turnwise.protocols.agent import ServingAgent
from turnwise.types import JsonObject


class Service(Protocol):
    """
    A part of an agent that a run has once: in the driver, on the event loop of the runtime.

    Several workers may call at the same time, and a call may wait for as long as it needs to. It is cancelled when its
    caller is cancelled, when the worker of its caller dies, and when the run ends.
    """

    async def open(self, host: str) -> Mapping[str, str]:
        """
        Start; return the addresses by name, for `RolloutManager.addresses`.

        Args:
            host: address of the driver's machine for the other machines of the run; on the local runtime 127.0.0.1.
        """

    async def call(self, method: str, arguments: JsonObject) -> object:
        """Answer a worker's call with plain data; the caller gets an exception of the same class and text."""

    async def close(self) -> None:
        """End and free everything, also after a failed `open`; no call runs any more."""


class ServiceClient(Protocol):
    """The service of an agent, as a worker sees it."""

    @property
    def host(self) -> str:
        """Address of the worker's machine for the other machines of the run."""

    @property
    def driver_host(self) -> str:
        """Address of the driver's machine, in the same form: workers beside the driver have the same."""

    async def call(self, method: str, **arguments: object) -> Any:
        """
        Call the service; numbers, texts, bytes, lists and dicts with texts as keys cross, and tuples become lists.

        Raises:
            TypeError: an argument or the result is no such data.
            InfrastructureError: the run ends, or has no such service.
            Exception: raised by the service.
        """


@runtime_checkable
class ServiceAgent(ServingAgent, Protocol):
    """An agent with a service in the driver. Only agents that the config names have one."""

    def make_service(self) -> Service:
        """Build the service, which starts nothing yet. Only the object in the driver is asked, once a run."""

    def connect(self, service: ServiceClient) -> None:
        """Receive the client of the service, in each worker before `open`."""
