"""
HTTP requests to the servers: keys, certificates, timeouts, and errors that another server may not have.

The content of a response is not interpreted here.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from turnwise.errors import ConfigError
from turnwise_openai_engine.config import OpenAIConfig
from turnwise_openai_engine.output import BadOutputError, ServerFailure

_TEMPORARY = frozenset({408, 409, 425, 429})
"""HTTP statuses that do not blame the request, like every 5xx."""


def make_session(config: OpenAIConfig) -> aiohttp.ClientSession:
    """Return a session; `ConfigError` if the key or the certificates are missing."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s, sock_read=config.read_timeout_s)
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=config.max_connections, ssl=_tls(config))
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=_headers(config))


def _tls(config: OpenAIConfig) -> ssl.SSLContext | bool:
    if not config.verify:
        return False
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read the certificates in {str(config.ca_file)!r}: {error}") from error


def _headers(config: OpenAIConfig) -> Mapping[str, str]:
    if config.api_key_env is None:
        return {}
    if not (key := os.environ.get(config.api_key_env)):
        raise ConfigError(f"the environment variable {config.api_key_env!r}, named by api_key_env, is not set")
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def post_json(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, object], request_id: str
) -> AsyncIterator[AsyncIterator[bytes]]:
    """
    Post JSON and yield the lines of the response. Leaving the context early closes the connection.

    Raises:
        ServerFailure: the server or the connection failed.
        BadOutputError: the server refused the request.
    """
    try:
        # No redirects: they could send the key elsewhere.
        async with session.post(
            url, json=body, headers={"X-Request-Id": request_id}, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise _status_error(response.status, url, await response.text())
            yield _lines(response)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _failure(url, error) from error


def _failure(url: str, error: Exception) -> ServerFailure:
    kind = "untrusted certificate" if isinstance(error, aiohttp.ClientSSLError) else type(error).__name__
    return ServerFailure(f"{url} failed: {kind}: {str(error) or 'no response in time'}")


def _status_error(status: int, url: str, text: str) -> Exception:
    line = next((each.strip() for each in text.splitlines() if each.strip()), "no text")[:300]
    message = f"{url} returned status {status}: {line}"
    if status >= 500 or status in _TEMPORARY:
        return ServerFailure(message)
    if status in (401, 403):
        return BadOutputError(
            f"{url} returned status {status}: it needs a key; set api_key_env to the environment variable with the key"
        )
    return BadOutputError(message)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines of any length: aiohttp's own reader refuses long ones."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def health_problem(session: aiohttp.ClientSession, url: str, timeout_s: float) -> str:
    """Return why a server is unhealthy, or an empty text."""
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(f"{url}/health", timeout=timeout, allow_redirects=False) as response:
            if response.status == 200:
                return ""
            return str(_status_error(response.status, f"{url}/health", await response.text()))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return str(_failure(url, error))


async def list_models(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """Return a server's descriptions of its models; errors as in `post_json`."""
    try:
        async with session.get(f"{url}/v1/models", allow_redirects=False) as response:
            if response.status != 200:
                raise _status_error(response.status, f"{url}/v1/models", await response.text())
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _failure(url, error) from error
    except ValueError as error:
        raise BadOutputError(f"{url}/v1/models did not return JSON: {error}") from error
    models = body.get("data") if isinstance(body, dict) else None
    if not isinstance(models, list) or not all(isinstance(each, dict) and "id" in each for each in models):
        raise BadOutputError(f"{url}/v1/models lists no models: it is not a vLLM server")
    return models
