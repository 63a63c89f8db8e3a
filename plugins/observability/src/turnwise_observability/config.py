"""Options of the observers, and whether the environment enables spans."""

from __future__ import annotations

import os
from typing import Final

from attrs import field, frozen, validators

INSTALL_OTEL: Final = "pip install 'turnwise-observability[otel]'"
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@frozen(kw_only=True)
class PrometheusConfig:
    """
    Options of `prometheus`.

    Attributes:
        port: port of ``http://HOST:PORT/metrics``; 0 chooses a free port and logs it.
        host: address to listen on; an address other than loopback requires a token.
        token_env: environment variable with the token of the header ``Authorization: Bearer TOKEN`` of a scrape.
    """

    port: int = field(default=9464, validator=[validators.ge(0), validators.le(65535)])
    host: str = "127.0.0.1"
    token_env: str = "TURNWISE_PROMETHEUS_TOKEN"


@frozen(kw_only=True)
class OtelConfig:
    """
    Options of `otel`.

    Attributes:
        endpoint: base URL of an OTLP receiver over HTTP, such as `http://127.0.0.1:4318`; null takes it from the
            environment variable `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`.
        service_name: name of the service in the spans; `OTEL_SERVICE_NAME` overrides it.
        texts: put prompts, answers, and arguments and results of tools on the spans.
        text_limit: most characters of one of these texts; a longer one is cut, and a mark says by how many.
    """

    endpoint: str | None = None
    service_name: str = "turnwise"
    texts: bool = False
    text_limit: int = field(default=4096, validator=validators.ge(1))

    def __attrs_post_init__(self) -> None:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"'endpoint' must start with http:// or https://, got {self.endpoint!r}")


def is_enabled() -> bool:
    """
    Return whether the environment enables spans.

    An OTLP endpoint enables them, unless `OTEL_SDK_DISABLED` is true or `OTEL_TRACES_EXPORTER` is none. The endpoint
    may be meant for other programs, so a missing package is a warning and not an error.
    """
    enabled = any(os.environ.get(name) for name in ENDPOINTS)
    disabled = (
        os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    )
    if not enabled or disabled:
        return False
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 - only to check that they are installed
    except ModuleNotFoundError as error:
        import structlog

        structlog.get_logger().warning(
            "an OTLP endpoint is set, but spans are off",
            missing=error.name,
            install=INSTALL_OTEL,
        )
        return False
    return True


@frozen
class RoutingLogConfig:
    """
    Options of `routing_log`.

    Attributes:
        sticky: also log requests of episodes that stay on their replica, which are nearly all.
    """

    sticky: bool = True


@frozen
class TraceFileConfig:
    """
    Options of `trace_file`.

    Attributes:
        path: file to write; an existing file is replaced. Open it at https://ui.perfetto.dev.
    """

    path: str
