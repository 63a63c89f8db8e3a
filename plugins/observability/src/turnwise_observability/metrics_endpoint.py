"""
The observer `prometheus`: serves the metrics of a run at an HTTP endpoint of the driver.

A run with many processes has one endpoint, because the events of workers reach the driver with their results. By
default the endpoint listens on loopback only. On any other address each scrape needs a token.
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

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise_observability.config import PrometheusConfig
from turnwise_observability.metrics import MetricsObserver

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

App = Callable[[Any, Any], Iterable[bytes]]


class PrometheusObserver(MetricsObserver):
    """Serves metrics from `open` to `close`; `open` raises `ConfigError` if the port is taken or a token is missing."""

    def __init__(self, config: PrometheusConfig, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._config = config
        self._registry = registry
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Address of the metrics; empty before `open` and after `close`."""
        if self._server is None:
            return ""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self._server.server_port}/metrics"

    def open(self) -> None:
        from prometheus_client import make_wsgi_app

        if self._server is not None:
            return
        config = self._config
        token = os.environ.get(config.token_env, "")
        if not token and not _is_loopback(config.host):
            raise ConfigError(
                f"observer prometheus: host {config.host} is reachable from other machines: "
                f"set a token in the environment variable {config.token_env}"
            )
        kind = _Server6 if ":" in config.host else _Server
        try:
            self._server = kind((config.host, config.port), _QuietHandler)
        except OSError as error:
            raise ConfigError(
                f"observer prometheus: cannot listen on {config.host} port {config.port}: {error.strerror}"
            ) from error
        self._server.set_app(_with_token(make_wsgi_app(self._registry), token))
        self._thread = threading.Thread(target=self._server.serve_forever, name="turnwise-prometheus", daemon=True)
        self._thread.start()
        structlog.get_logger().info("serving metrics", url=self.url)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()


def make_prometheus(config: PrometheusConfig, _resources: Resources) -> PrometheusObserver:
    """Return the observer with a new registry; `ConfigError` if `prometheus_client` is not installed."""
    try:
        from prometheus_client import CollectorRegistry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"observer prometheus: needs {error.name}: pip install 'turnwise-observability[prometheus]'"
        ) from error
    return PrometheusObserver(config, CollectorRegistry())


class _Server(ThreadingMixIn, WSGIServer):
    """Handles each scrape in a thread, so that a stalled scrape delays neither another one nor the end of the run."""

    daemon_threads = True
    block_on_close = False


class _Server6(_Server):
    address_family = AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line for each scrape, every few seconds, would bury the log of the run."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_token(app: App, token: str) -> App:
    """Return the app with a check of the token; unchanged if the token is empty."""
    if not token:
        return app
    expected = f"Bearer {token}".encode()

    def guard(environ: Any, start_response: Any) -> Iterable[bytes]:
        shown = environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")
        # In constant time, so that response times do not reveal how much of a wrong token matches.
        if hmac.compare_digest(shown, expected):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"a bearer token is required\n"]

    return guard
