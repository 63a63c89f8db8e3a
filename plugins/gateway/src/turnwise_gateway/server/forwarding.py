"""Passes calls of models that other servers have on to them; only the name of the model may change."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

import aiohttp
from aiohttp import web
from attrs import define, field, frozen

from turnwise.threads import in_thread
from turnwise.types import JsonDict
from turnwise_gateway.calls import CallRefusedError, ForwardedCall, SessionBackend
from turnwise_gateway.dialects import write_json
from turnwise_gateway.dialects.strict_json import read_json
from turnwise_gateway.limits import MAX_INLINE_BYTES
from turnwise_gateway.models import Endpoint
from turnwise_gateway.server.delivery import SERVER_HEADERS
from turnwise_gateway.server.options import ServerOptions
from turnwise_gateway.server.routes import Route

_PASSED_ON: Final = ("anthropic-", "openai-")
"""Starts of the names of headers of a request that the other server gets."""
_PASSED_BACK: Final = frozenset({"content-type", "retry-after", "x-should-retry"})
_CONNECT_S: Final = 30.0


class _ClientLeftError(Exception):
    """The agent does not take the response."""


@frozen
class Forwarding:
    """
    A request for another server.

    Attributes:
        endpoint: the server.
        model: name that the agent sent.
        path: of the request below the base URL, with its query.
        body: with the name of the model there.
        headers: with the key.
    """

    endpoint: Endpoint
    model: str
    path: str
    body: bytes
    headers: Mapping[str, str]

    @property
    def url(self) -> str:
        """The target."""
        return f"{self.endpoint.base_url.rstrip('/')}/{self.path}"


@define
class _Received:
    """The response of another server so far; the status is 0 before its head."""

    forwarding: Forwarding
    status: int = 0
    parts: list[bytes] = field(factory=list)

    def describe(self) -> ForwardedCall:
        return ForwardedCall(
            path=f"/v1/{self.forwarding.path}",
            model=self.forwarding.model,
            body=self.forwarding.body,
            status=self.status,
            response=b"".join(self.parts),
        )


async def find_forwarding(
    request: web.BaseRequest, route: Route, body: bytes, backend: SessionBackend
) -> Forwarding | None:
    """Return the request for another server; None where the policy answers, or the dialect has to refuse the body."""
    if not backend.others.has_endpoints:
        return None
    parse = partial(_read_model, body)
    model, fields = parse() if len(body) <= MAX_INLINE_BYTES else await in_thread(parse, {})
    endpoint = backend.others.find_endpoint(model)
    if endpoint is None:
        return None
    changed = body if endpoint.model is None else write_json({**fields, "model": endpoint.model})
    path = request.raw_path.rpartition("/v1/")[2]
    return Forwarding(endpoint, model, path, changed, _write_headers(request.headers, route, endpoint))


@define(eq=False)
class Forwarder:
    """
    Sends requests to other servers, and their responses to the agents.

    Attributes:
        options: limits of the server.
    """

    options: ServerOptions
    _http: aiohttp.ClientSession | None = field(default=None, init=False)

    async def close(self) -> None:
        """Close all connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def respond(
        self, request: web.BaseRequest, forwarding: Forwarding, backend: SessionBackend
    ) -> web.StreamResponse:
        """
        Answer a request by the response of another server, while it comes.

        Raises:
            CallRefusedError: the session is over or ends, or the other server cannot be reached or does not answer in
                time.
        """
        response = web.StreamResponse(headers=SERVER_HEADERS)
        received = _Received(forwarding)
        try:
            async with backend.others.forwarding(received.describe):
                await self._pass_on(request, response, received)
        except _ClientLeftError:
            return response
        except (aiohttp.ClientError, TimeoutError, CallRefusedError) as error:
            if response.prepared:
                if request.transport is not None:  # half a response must not pass for a whole
                    request.transport.close()
                return response
            if isinstance(error, CallRefusedError):
                raise
            text = f"the server of the model {forwarding.model!r} failed: {type(error).__name__}"
            raise CallRefusedError("endpoint", text) from error
        return response

    async def _pass_on(self, request: web.BaseRequest, response: web.StreamResponse, received: _Received) -> None:
        async with self._post(received.forwarding) as answer:
            received.status = answer.status
            response.set_status(answer.status)
            response.headers.update(_read_headers(answer.headers))
            async for part in answer.content.iter_any():
                received.parts.append(part)
                await self._write(request, response, part)
        await self._write(request, response, None)

    def _post(self, forwarding: Forwarding) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=True)
        timeout = aiohttp.ClientTimeout(total=forwarding.endpoint.timeout_s, sock_connect=_CONNECT_S)
        # A redirection would take the key along.
        return self._http.post(
            forwarding.url,
            data=forwarding.body,
            headers=forwarding.headers,
            timeout=timeout,
            allow_redirects=False,
        )

    async def _write(self, request: web.BaseRequest, response: web.StreamResponse, part: bytes | None) -> None:
        """Send a part of a response, or its end."""
        try:
            async with asyncio.timeout(self.options.send_s):
                await response.prepare(request)
                await (response.write_eof() if part is None else response.write(part))
        except (ConnectionError, TimeoutError) as error:
            if request.transport is not None:
                request.transport.abort()
            raise _ClientLeftError from error


def _read_model(body: bytes) -> tuple[str, JsonDict]:
    """Return the model and the fields of a body; an empty name where it has none."""
    try:
        fields = read_json(body)
    except CallRefusedError:
        return "", {}
    model = fields.get("model")
    return (model, fields) if isinstance(model, str) else ("", {})


def _write_headers(given: Mapping[str, str], route: Route, endpoint: Endpoint) -> dict[str, str]:
    headers = {name: value for name, value in given.items() if name.lower().startswith(_PASSED_ON)}
    # A compressed response could not be kept as text.
    headers |= {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if endpoint.api_key_env is not None:
        key = os.environ[endpoint.api_key_env]
        headers |= {"x-api-key": key} if route.dialect.name == "messages" else {"Authorization": f"Bearer {key}"}
    return headers


def _read_headers(received: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in received.items() if name.lower() in _PASSED_BACK}
