"""Runs one server for each worker: from the first session until no session is left."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Final

from attrs import define, field, frozen

from turnwise.errors import InfrastructureError
from turnwise_gateway.calls import CallerCheck, SessionBackend
from turnwise_gateway.per_loop import PerLoop
from turnwise_gateway.programs.callers import ProcessCensus, ProgramCallers
from turnwise_gateway.programs.program_places import ProgramPlaces
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory

_MAX_ENDED: Final = 1024
"""Sessions that are over and whose late calls are still told so."""


@frozen(kw_only=True)
class ModelClient:
    """
    The things that an agent needs to call the model.

    Attributes:
        openai_base_url: for clients of OpenAI's APIs.
        anthropic_base_url: for clients of Anthropic's API.
        api_key: of this attempt alone.
        model: name of the model.
        mcp_url: of the run's tools, as a server of the Model Context Protocol; it takes the same key.
    """

    openai_base_url: str
    anthropic_base_url: str
    api_key: str
    model: str
    mcp_url: str


@define(eq=False)
class RunningServer:
    """
    A server that listens.

    Attributes:
        model: name of the served model.
        options: of the server.
    """

    model: str
    options: ServerOptions
    _directory: SessionDirectory = field(init=False)
    _server: GatewayServer = field(init=False)
    _ended: deque[str] = field(factory=deque, init=False)
    _census: ProcessCensus | None = field(default=None, init=False)
    _programs: ProgramPlaces = field(factory=ProgramPlaces, init=False)

    def __attrs_post_init__(self) -> None:
        self._directory = SessionDirectory(self.model)
        self._server = GatewayServer(self._directory, self.options)

    @property
    def url(self) -> str:
        """Address of the started server."""
        return self._server.url()

    async def start(self) -> None:
        """Listen; `InfrastructureError` if the address cannot be used."""
        try:
            await self._server.start()
        except OSError as error:
            raise InfrastructureError(f"the gateway cannot listen: {error}") from error

    async def stop(self) -> None:
        """Close all connections."""
        await self._server.stop()
        if self._census is not None:
            self._census.sockets.close()

    def hold_program(self) -> AbstractAsyncContextManager[None]:
        """Wait until another program fits into the limit of descriptors, and hold its place."""
        return self._programs.hold()

    def bind_callers(self, name: str) -> ProgramCallers:
        """Return a check that admits the processes of one program to the session of this name, for `open`."""
        if self._census is None:
            self._census = ProcessCensus()
        return ProgramCallers(name, self._census)

    @asynccontextmanager
    async def open_at(self, listener: socket.socket, name: str, session: SessionBackend) -> AsyncIterator[ModelClient]:
        """Let the calls that come to a listener, and no others, reach a session inside the `async with` statement."""
        port = listener.getsockname()[1]
        with self.open(name, session, root=f"http://127.0.0.1:{port}") as client:
            async with self._server.serve_at(listener, session):
                yield client

    @contextmanager
    def open(
        self, name: str, session: SessionBackend, check: CallerCheck | None = None, *, root: str | None = None
    ) -> Iterator[ModelClient]:
        """
        Let calls reach a session inside the `with` statement; later ones are refused.

        Args:
            name: of the session.
            session: answers the calls.
            check: tells whose calls it answers; None for all with its key.
            root: address by which the agent reaches the server; by default the one that it listens at.
        """
        key = self._directory.add(name, session)
        if check is not None:
            self._server.bind(session, check)
        url = self._server.url(name) if root is None else f"{root}/s/{name}"
        try:
            yield ModelClient(
                openai_base_url=f"{url}/v1",
                anthropic_base_url=url,
                api_key=key,
                model=self.model,
                mcp_url=f"{url}/mcp",
            )
        finally:
            self._directory.end(name)
            self._server.forget_requests(session)
            self._note_ended(name)

    def add_ended(self, name: str, digest: bytes) -> None:
        """Tell the calls of a session of an earlier process, which had a key with this digest, that it is over."""
        self._directory.add_ended(name, digest)
        self._note_ended(name)

    def _note_ended(self, name: str) -> None:
        self._ended.append(name)
        if len(self._ended) > _MAX_ENDED:
            self._directory.forget(self._ended.popleft())


@define(eq=False)
class ServerHost:
    """
    Starts and stops the server of a worker.

    Attributes:
        model: name of the served model.
        options: of the server.
    """

    model: str
    options: ServerOptions = field(factory=ServerOptions)
    _servers: PerLoop[RunningServer] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._servers = PerLoop(self._run)

    def serve(self) -> AbstractAsyncContextManager[RunningServer]:
        """Keep the server of the running event loop up inside the `async with` statement."""
        return self._servers.use()

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[RunningServer]:
        server = RunningServer(self.model, self.options)
        await server.start()
        try:
            yield server
        finally:
            await server.stop()
