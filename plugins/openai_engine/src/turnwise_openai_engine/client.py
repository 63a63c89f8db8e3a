"""
HTTP to the servers: keys, certificates, timeouts, and which failures another server may not have.

Nothing here knows what an answer means.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from turnwise.errors import EngineError
from turnwise_openai_engine.answers import BadAnswerError, ServerFailure
from turnwise_openai_engine.config import OpenAIConfig

_TRY_ELSEWHERE = frozenset({408, 409, 425, 429})
"""Refusals that are about the moment and not about the request; so is every 5xx."""


def make_session(config: OpenAIConfig) -> aiohttp.ClientSession:
    """Return a session; `EngineError` for a key or certificates that are not there."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s, sock_read=config.read_timeout_s)
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=config.max_connections, ssl=_tls(config))
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=_headers(config))


def _tls(config: OpenAIConfig) -> ssl.SSLContext | bool:
    if not config.verify:
        return False
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise EngineError(f"cannot read the certificates in {str(config.ca_file)!r}: {error}") from error


def _headers(config: OpenAIConfig) -> Mapping[str, str]:
    if config.api_key_env is None:
        return {}
    if not (key := os.environ.get(config.api_key_env)):
        raise EngineError(f"the environment variable {config.api_key_env!r}, which api_key_env names, is not set")
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def posted(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], request_id: str
) -> AsyncIterator[AsyncIterator[bytes]]:
    """
    Post JSON and yield the lines of the answer; leaving the context early closes the connection.

    Raises:
        ServerFailure: the server, or the way to it, failed.
        BadAnswerError: the server refused the request.
    """
    try:
        # A redirect could take the key elsewhere.
        async with session.post(
            url, json=body, headers={"X-Request-Id": request_id}, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise _refusal(response.status, url, await response.text())
            yield _lines(response)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _failure(url, error) from error


def _failure(url: str, error: Exception) -> ServerFailure:
    kind = "no certificate that is trusted" if isinstance(error, aiohttp.ClientSSLError) else type(error).__name__
    return ServerFailure(f"{url} failed: {kind}: {str(error) or 'no answer in time'}")


def _refusal(status: int, url: str, text: str) -> Exception:
    line = next((each.strip() for each in text.splitlines() if each.strip()), "it left no word")[:300]
    message = f"{url} answered {status}: {line}"
    if status >= 500 or status in _TRY_ELSEWHERE:
        return ServerFailure(message)
    if status in (401, 403):
        return BadAnswerError(f"{url} answered {status}: it wants a key; name its environment variable in api_key_env")
    return BadAnswerError(message)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of any length: aiohttp's own reader refuses long ones."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def is_healthy(session: aiohttp.ClientSession, url: str, timeout_s: float) -> str:
    """Return why a server is not well, or an empty text."""
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(f"{url}/health", timeout=timeout, allow_redirects=False) as response:
            if response.status == 200:
                return ""
            return str(_refusal(response.status, f"{url}/health", await response.text()))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return str(_failure(url, error))


async def served_models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """Return what a server says of its models; errors as in `posted`."""
    try:
        async with session.get(f"{url}/v1/models", allow_redirects=False) as response:
            if response.status != 200:
                raise _refusal(response.status, f"{url}/v1/models", await response.text())
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _failure(url, error) from error
    except ValueError as error:
        raise BadAnswerError(f"{url}/v1/models is no JSON: {error}") from error
    models = body.get("data") if isinstance(body, dict) else None
    if not isinstance(models, list) or not all(isinstance(each, dict) and "id" in each for each in models):
        raise BadAnswerError(f"{url}/v1/models names no models: it is no vLLM server")
    return models
