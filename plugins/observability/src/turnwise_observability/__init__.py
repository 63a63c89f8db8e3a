"""Registers observers of episodes, requests and whole runs, and the command `mask`."""

from __future__ import annotations

from turnwise import Command, NoConfig, Observer, Registry, Resources, hookimpl
from turnwise_observability.config import OtelConfig, PrometheusConfig, RoutingLogConfig, TraceFileConfig, is_enabled


def make_episode_log(_config: NoConfig, _resources: Resources) -> Observer:
    """Return the observer."""
    from turnwise_observability.episode_log import EpisodeLog

    return EpisodeLog()


def make_prometheus(config: PrometheusConfig, resources: Resources) -> Observer:
    """Return the observer; `ConfigError` if its package is missing."""
    from turnwise_observability import metrics_endpoint

    return metrics_endpoint.make_prometheus(config, resources)


def make_otel(config: OtelConfig, resources: Resources) -> Observer:
    """Return the observer; `ConfigError` if its packages or an endpoint are missing."""
    from turnwise_observability import otel

    return otel.make_otel(config, resources)


def make_routing_log(config: RoutingLogConfig, _resources: Resources) -> Observer:
    """Return the observer."""
    from turnwise_observability.routing_log import RoutingLog

    return RoutingLog(config)


def make_trace_file(config: TraceFileConfig, resources: Resources) -> Observer:
    """Return the observer."""
    from turnwise_observability import trace_file

    return trace_file.make_trace_file(config, resources)


def make_mask(_config: NoConfig, _resources: Resources) -> Command:
    """Return the command."""
    from turnwise_observability.mask_command import MaskCommand

    return MaskCommand()


@hookimpl
def register_observers(registry: Registry[Observer]) -> None:
    """Add the observers; an OTLP endpoint in the environment enables `otel`."""
    registry.add("episode_log", make_episode_log)
    registry.add("prometheus", make_prometheus, config=PrometheusConfig)
    registry.add("otel", make_otel, config=OtelConfig, enabled_if=is_enabled)
    registry.add("routing_log", make_routing_log, config=RoutingLogConfig)
    registry.add("trace_file", make_trace_file, config=TraceFileConfig)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `mask`."""
    registry.add("mask", make_mask)
