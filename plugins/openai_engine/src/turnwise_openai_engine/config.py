"""Options of the engine for external servers. The config contains no key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import Attribute, field, frozen, validators


def _seconds(default: float) -> Any:
    return field(default=default, validator=validators.gt(0))


def _urls(urls: Any) -> tuple[str, ...]:
    return (urls.rstrip("/"),) if isinstance(urls, str) else tuple(url.rstrip("/") for url in urls)


def _check_urls(_config: object, attribute: Attribute[Any], urls: tuple[str, ...]) -> None:
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{attribute.name}' must have the form http://host:8000, got {url!r}")
        if parts.username or parts.password:
            raise ValueError(f"'{attribute.name}' must not contain a password: use api_key_env")
    if not urls:
        raise ValueError(f"'{attribute.name}' must contain at least one server")
    if len(set(urls)) < len(urls):
        raise ValueError(f"'{attribute.name}' must contain each server once")


@frozen(kw_only=True)
class OpenAIConfig:
    """
    The servers, and the protocol to use.

    Attributes:
        urls: of the servers, without `/v1`. All serve the same model.
        protocol: `vllm` for `/v1/completions` with token ids, `sglang` for `/generate`.
        model: a vLLM server's name of its model; None uses the only one that it serves.
        max_context: most tokens of context and output together; None leaves it to the servers.
        api_key_env: environment variable with the key, which is sent as a bearer token and never written anywhere.
        ca_file: certificates to check the servers' with; None uses the system's.
        verify: whether to check certificates.
        max_connections: to each server, and so the most requests that it gets at once.
        connect_timeout_s: for a connection.
        read_timeout_s: between two pieces of a response; an SGLang response comes in one piece.
        abort_timeout_s: for an aborted request to return its tokens.
        health_interval_s: between two health checks of each server.
        retries: most retries of a request after server failures.
        backoff_s: wait before the first retry; it doubles each time.
    """

    urls: tuple[str, ...] = field(converter=_urls, validator=_check_urls)
    protocol: Literal["vllm", "sglang"] = "vllm"
    model: str | None = None
    max_context: int | None = field(default=None, validator=validators.optional(validators.ge(2)))
    api_key_env: str | None = None
    ca_file: Path | None = None
    verify: bool = True
    max_connections: int = field(default=512, validator=validators.ge(1))
    connect_timeout_s: float = _seconds(10.0)
    read_timeout_s: float = _seconds(600.0)
    abort_timeout_s: float = _seconds(5.0)
    health_interval_s: float = _seconds(5.0)
    retries: int = field(default=5, validator=validators.ge(0))
    backoff_s: float = _seconds(0.5)
