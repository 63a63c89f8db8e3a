"""Builds a run from its config: parts, plan and runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec

import structlog

from turnwise.config.models import pin_models
from turnwise.config.own_code import OwnParts, place_parts
from turnwise.config.resolve import load_plugins, resolve
from turnwise.config.run import RunConfig
from turnwise.errors import ConfigError
from turnwise.events.dispatch import Observers
from turnwise.events.logging import configure_logging
from turnwise.events.observer import Observer
from turnwise.plugin.host import Host
from turnwise.protocols import Chat, Resources
from turnwise.runtime.build import RunBuilder
from turnwise.runtime.groups import GroupScoring
from turnwise.runtime.interface import Runtime
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.placement import check_interpreters, plan_placement
from turnwise.runtime.plan import RolloutPlan
from turnwise.types import Task

LaunchedRun = tuple[Runtime, RolloutPlan, Observers, Chat | None, GroupScoring | None, Callable[[], object]]
"""The parts of a `RolloutManager`; the runtime is not started."""


def launch(config: RunConfig, host: Host | None = None, parts: OwnParts | None = None) -> LaunchedRun:
    """Build a run; arguments and errors as in `RolloutManager.from_config`."""
    if not structlog.is_configured():  # a script; the command line has read the section before
        configure_logging(config.telemetry.log_level, config.telemetry.log_format)
    host = load_plugins(config) if host is None else host
    parts = parts or {}
    config, given = place_parts(config, parts)
    config = resolve(config, host)  # a config that a program built is checked like one from a file
    # The small files of models: a plan, a dry run and the check of a template need no weights.
    config = pin_models(config, host, weights=False)
    if config.runtime.name == "ray" and find_spec("ray") is None:  # else the first actor misses it, in a traceback
        raise ConfigError("runtime ray needs ray: pip install 'turnwise[ray]'")
    # The weights come before the first engine, in this process alone: many replicas would ask for the same files.
    return *_launched(config, host, parts.get("observers", ()), given), partial(pin_models, config, host)


def check_run(config: RunConfig, host: Host, tasks: Iterable[Task] = ()) -> None:
    """
    Build every part that a run builds before its engines start, and start nothing; Ray need not be installed.

    The small files of a model on the hub are downloaded. Engines of another interpreter are not built: it may have
    other packages.

    Args:
        config: resolved, with the plugins of `host`.
        host: the loaded plugins.
        tasks: the tasks of the run; each must name an agent that there is.

    Raises:
        ConfigError, DataError, PluginError, TemplateError: the run is impossible; one line for each problem.
    """
    placement = plan_placement(config)
    check_interpreters(placement)
    config = pin_models(config, host, weights=False)
    _runtime, plan, *_ = _launched(config, host, (), {})
    plan.specs(tasks, global_step=config.rollout.global_step, validation=config.rollout.validation)
    if config.runtime.name == "ray":
        builder, local = RunBuilder(config, host), {pool.name for pool in placement.pools if pool.python is None}
        if "policy" in local:
            plan.check_engine(builder.build_engine())
        if "judge" in local:
            builder.build_judge_engine()


def build_resources(config: RunConfig, host: Host) -> Resources:
    """
    Build the chat, the tools and the parsers of a run, for commands that read or write its conversations.

    The small files of a model on the hub are downloaded.

    Args:
        config: resolved, with the plugins of `host`.
        host: the loaded plugins.

    Raises:
        ConfigError, PluginError, TemplateError: a part cannot be built.
    """
    return RunBuilder(pin_models(config, host, weights=False), host).resources


_Parts = tuple[Runtime, RolloutPlan, Observers, Chat | None, GroupScoring | None]


def _launched(config: RunConfig, host: Host, observers: Iterable[Observer], given: Mapping[str, object]) -> _Parts:
    build = _launch_on_ray if config.runtime.name == "ray" else _launch_locally
    return build(config, host, observers, given)


def _launch_locally(
    config: RunConfig, host: Host, observers: Iterable[Observer], given: Mapping[str, object]
) -> _Parts:
    # By another builder: this one needs the judge before its first part, because rewards are built with it.
    judge = RunBuilder(config, host, fetches_weights=False).build_judge_engine()
    builder = RunBuilder(config, host, judge, given, fetches_weights=False)
    plan, chat = builder.plan(), builder.resources.chat
    all_observers = Observers.of([*observers, *builder.build_observers()])
    engine = builder.build_engine()
    plan.check_engine(engine)  # again after the start, but a large model takes minutes to load
    components = builder.worker_components(engine, all_observers)
    services = builder.build_services()
    runtime = LocalRuntime(engine, components, config.runtime.num_workers, judge, builder.make_weight_source, services)
    return runtime, plan, all_observers, chat, builder.build_groups(all_observers)


def _launch_on_ray(config: RunConfig, host: Host, observers: Iterable[Observer], given: Mapping[str, object]) -> _Parts:
    from turnwise.runtime.ray.blueprint import ConfigBlueprint, build_group_weights
    from turnwise.runtime.ray.runtime import RayRuntime
    from turnwise.runtime.remote.reward_pool import RewardPool

    placement = plan_placement(config)  # first, because its errors cost no time
    builder = RunBuilder(config, host, given=given)
    plan = builder.plan()
    builder.build_router()  # each worker builds its own; this one finds errors before Ray starts
    # The other observers are built in the workers, where their events happen.
    all_observers = Observers.of([*observers, *builder.build_observers(place="driver")])
    blueprint, weights = ConfigBlueprint.of(config, host, given), build_group_weights(builder)
    pool = None if config.group_reward is None else RewardPool(config.runtime.ray.reward_tries)
    groups = builder.build_groups(all_observers, pool)
    services = builder.build_services()
    runtime = RayRuntime(blueprint, config.runtime, all_observers, placement, weights, pool, services)
    return runtime, plan, all_observers, builder.resources.chat, groups
