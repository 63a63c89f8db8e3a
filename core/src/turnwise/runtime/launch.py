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
from turnwise.protocols import Chat
from turnwise.runtime.build import RunBuilder
from turnwise.runtime.groups import GroupScoring
from turnwise.runtime.interface import Runtime
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.placement import plan_placement
from turnwise.runtime.plan import RolloutPlan

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
    build = _launch_on_ray if config.runtime.name == "ray" else _launch_locally
    # The weights come before the first engine, in this process alone: many replicas would ask for the same files.
    return *build(config, host, parts.get("observers", ()), given), partial(pin_models, config, host)


_Parts = tuple[Runtime, RolloutPlan, Observers, Chat | None, GroupScoring | None]


def _launch_locally(
    config: RunConfig, host: Host, observers: Iterable[Observer], given: Mapping[str, object]
) -> _Parts:
    # By another builder: this one needs the judge before its first part, because rewards are built with it.
    judge = RunBuilder(config, host, fetches_weights=False).build_judge_engine()
    builder = RunBuilder(config, host, judge, given, fetches_weights=False)
    plan, chat = builder.plan(), builder.resources.chat
    all_observers = Observers.of([*observers, *builder.build_observers()])
    engine = builder.build_engine()
    components = builder.worker_components(engine, all_observers)
    runtime = LocalRuntime(engine, components, config.runtime.num_workers, judge, builder.make_weight_source)
    return runtime, plan, all_observers, chat, builder.build_groups(all_observers)


def _launch_on_ray(config: RunConfig, host: Host, observers: Iterable[Observer], given: Mapping[str, object]) -> _Parts:
    if find_spec("ray") is None:  # else it would be missed by the first actor, deep in a traceback
        raise ConfigError("runtime ray needs ray: pip install 'turnwise[ray]'")
    from turnwise.runtime.ray.blueprint import ConfigBlueprint, build_group_weights
    from turnwise.runtime.ray.runtime import RayRuntime
    from turnwise.runtime.remote.reward_pool import RewardPool

    placement = plan_placement(config)  # first, because its errors cost no time
    builder = RunBuilder(config, host, given=given)
    plan = builder.plan()
    # The other observers are built in the workers, where their events happen.
    all_observers = Observers.of([*observers, *builder.build_observers(place="driver")])
    blueprint, weights = ConfigBlueprint.of(config, host, given), build_group_weights(builder)
    pool = None if config.group_reward is None else RewardPool(config.runtime.ray.reward_tries)
    groups = builder.build_groups(all_observers, pool)
    runtime = RayRuntime(blueprint, config.runtime, all_observers, placement, weights, pool)
    return runtime, plan, all_observers, builder.resources.chat, groups
