"""
The core's own plugin: what turnwise itself registers, through the same door as every other plugin.

The entry point ``builtins`` of the group ``turnwise`` names this module, and `turnwise.host.load` always loads it.
"""

from __future__ import annotations

from turnwise.hookspecs import hookimpl
from turnwise.metrics_endpoint import PrometheusConfig
from turnwise.observer import Observer
from turnwise.protocols import Command, Resources, Router
from turnwise.registry import NoConfig, Registry
from turnwise.routing import ROUTERS
from turnwise.spans import SPANS, SpansConfig
from turnwise.telemetry import RoutingLogConfig
from turnwise.trace_file import TraceFileConfig


def _rollout(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.rollout_command import RolloutCommand

    return RolloutCommand()


def _show(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.show_command import ShowCommand

    return ShowCommand()


def _plugins(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.plugins_command import PluginsCommand

    return PluginsCommand()


def _plan(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.plan_command import PlanCommand

    return PlanCommand()


def _config(_no_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.config_command import ConfigCommand

    return ConfigCommand()


def _episode_log(_config: NoConfig, _resources: Resources) -> Observer:
    from turnwise.telemetry import EpisodeLog

    return EpisodeLog()


def _routing_log(config: RoutingLogConfig, _resources: Resources) -> Observer:
    from turnwise.telemetry import RoutingLog

    return RoutingLog(config)


def _prometheus(config: PrometheusConfig, _resources: Resources) -> Observer:
    from turnwise.metrics_endpoint import prometheus

    return prometheus(config)


def _trace_file(config: TraceFileConfig, _resources: Resources) -> Observer:
    from turnwise.trace_file import TraceFile

    return TraceFile(config.path)


def _spans(config: SpansConfig, resources: Resources) -> Observer:
    from turnwise.spans import Spans

    return Spans(config, "" if resources.model.path is None else resources.model.path.name)


def _bench(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.bench_command import BenchCommand

    return BenchCommand()


def _engines(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.engines_command import EnginesCommand

    return EnginesCommand()


def _check(_config: NoConfig, _resources: Resources) -> Command:
    from turnwise.cli.check_command import CheckCommand

    return CheckCommand()


@hookimpl
def register_routers(registry: Registry[Router]) -> None:
    """Add the routers; `least_tokens` is the default."""
    for name, (factory, config) in ROUTERS.items():
        registry.add(name, factory, config=config)


@hookimpl
def register_observers(registry: Registry[Observer]) -> None:
    """Add the log lines per episode and per routed request, the metrics endpoint, the trace file and the spans."""
    registry.add("episode_log", _episode_log)
    registry.add("routing_log", _routing_log, config=RoutingLogConfig)
    registry.add("prometheus", _prometheus, config=PrometheusConfig)
    registry.add("trace_file", _trace_file, config=TraceFileConfig)
    registry.add(SPANS, _spans, config=SpansConfig)


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add the commands that need no plugin."""
    registry.add("rollout", _rollout)
    registry.add("show", _show)
    registry.add("plan", _plan)
    registry.add("plugins", _plugins)
    registry.add("config", _config)
    registry.add("check", _check)
    registry.add("engines", _engines)
    registry.add("bench", _bench)
