"""
The observer `prometheus`: the metrics of a run at an HTTP endpoint of the driver, for Prometheus to scrape.

There is one endpoint, however many processes a run has: events of workers travel to the driver with what finishes. It
answers this machine alone unless a host is named; then whoever scrapes must show a token.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import threading
from collections.abc import Callable, Iterable
from socket import AF_INET6
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from attrs import field, frozen, validators

from turnwise.errors import ConfigError
from turnwise.metrics import Meters

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

App = Callable[[Any, Any], Iterable[bytes]]


@frozen(kw_only=True)
class PrometheusConfig:
    """
    Options of `prometheus`.

    Attributes:
        port: of the endpoint, at ``http://HOST:PORT/metrics``; 0 takes a free one, which the log names.
        host: address that it listens on; any but a loopback address needs a token.
        token_env: environment variable with the token that a scrape must show as ``Authorization: Bearer TOKEN``.
    """

    port: int = field(default=9464, validator=[validators.ge(0), validators.le(65535)])
    host: str = "127.0.0.1"
    token_env: str = "TURNWISE_PROMETHEUS_TOKEN"


class Prometheus(Meters):
    """
    Serves metrics from `open` to `close`.

    `open` raises `ConfigError` when the port is taken, a token is missing or the package is not installed.
    """

    def __init__(self, config: PrometheusConfig, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._config = config
        self._registry = registry
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the metrics are; empty while nothing is served."""
        if self._server is None:
            return ""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self._server.server_port}/metrics"

    def open(self) -> None:
        """Serve."""
        from prometheus_client import make_wsgi_app

        if self._server is not None:
            return
        config = self._config
        token = os.environ.get(config.token_env, "")
        if not token and not _is_loopback(config.host):
            raise ConfigError(
                f"the observer prometheus listens on {config.host}, which others can reach: "
                f"set a token in the environment variable {config.token_env}"
            )
        kind = _Server6 if ":" in config.host else _Server
        try:
            self._server = kind((config.host, config.port), _QuietHandler)
        except OSError as error:
            raise ConfigError(
                f"the observer prometheus cannot listen on {config.host} port {config.port}: {error.strerror}"
            ) from error
        self._server.set_app(_guarded(make_wsgi_app(self._registry), token))
        self._thread = threading.Thread(target=self._server.serve_forever, name="turnwise-prometheus", daemon=True)
        self._thread.start()
        structlog.get_logger().info("metrics are served", url=self.url)

    def close(self) -> None:
        """Serve no longer."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()


def prometheus(config: PrometheusConfig) -> Prometheus:
    """Return the observer with a registry of its own; `ConfigError` when the package is not installed."""
    try:
        from prometheus_client import CollectorRegistry
    except ModuleNotFoundError as error:
        raise ConfigError(f"the observer prometheus needs {error.name}: pip install 'turnwise[prometheus]'") from error
    return Prometheus(config, CollectorRegistry())


class _Server(ThreadingMixIn, WSGIServer):
    """A scrape that hangs keeps no other one waiting, nor the end of the run."""

    daemon_threads = True
    block_on_close = False


class _Server6(_Server):
    address_family = AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape every few seconds is no news."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _guarded(app: App, token: str) -> App:
    """Return the app behind a token, when there is one."""
    if not token:
        return app
    expected = f"Bearer {token}".encode()

    def guard(environ: Any, start_response: Any) -> Iterable[bytes]:
        shown = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        if hmac.compare_digest(shown, expected):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"a bearer token is needed\n"]

    return guard
