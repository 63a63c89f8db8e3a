"""Registers observers of episodes, requests and whole runs, and the command `mask`."""

from __future__ import annotations

from turnwise import Command, NoConfig, Observer, Registry, Resources, hookimpl
from turnwise_observability.episode_log import EpisodeLog
from turnwise_observability.metrics_endpoint import PrometheusConfig, make_prometheus
from turnwise_observability.otel import OtelConfig, is_enabled, make_otel
from turnwise_observability.routing_log import RoutingLog, RoutingLogConfig
from turnwise_observability.trace_file import TraceFileConfig, make_trace_file


def make_episode_log(_config: NoConfig, _resources: Resources) -> Observer:
    """Return the observer."""
    return EpisodeLog()


def make_routing_log(config: RoutingLogConfig, _resources: Resources) -> Observer:
    """Return the observer."""
    return RoutingLog(config)


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
