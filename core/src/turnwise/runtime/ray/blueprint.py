"""Blueprints: plain data from which every process of a run builds its own parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import evolve, field, frozen

from turnwise.config.file import structure_config, to_dict, with_absolute_paths
from turnwise.config.parts import Choice
from turnwise.config.run import RunConfig
from turnwise.episode.setup import EngineClient
from turnwise.errors import ConfigError, describe
from turnwise.events.dispatch import Observers
from turnwise.events.logging import configure_logging
from turnwise.plugin.host import Host, load
from turnwise.protocols import Engine, GroupReward, Reward, Router, WeightTransport
from turnwise.protocols.wrapper import Role
from turnwise.runtime.build import RunBuilder, transport_choice
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise.runtime.worker import WorkerComponents
from turnwise.types import JsonObject, PluginRecipe


class Blueprint(Protocol):
    """Builds the parts of an actor, in its process. It pickles, and is the same in every process of a run."""

    def make_engine(self) -> Engine:
        """Build the engine of a replica, not started."""

    def make_judge_engine(self) -> Engine:
        """Build the engine of a judge's replica, not started. Only called if a judge is configured."""

    def make_components(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerComponents:
        """Build the components of a worker from its clients of the replicas and of the judge's replicas."""

    def make_reward(self, judge: EngineClient | None = None) -> Reward | None:
        """Build the reward of a reward worker. Only called if reward workers are configured."""

    def make_group_reward(self, judge: EngineClient | None = None) -> GroupReward | None:
        """Build the group reward of a reward worker. Only called if one is configured."""

    def make_router(self) -> Router:
        """Build the router of a worker."""

    def make_transport(self) -> WeightTransport:
        """Build a replica's side of the weight transport. Only called if there is one."""


@frozen
class ConfigBlueprint:
    """
    The blueprint of a run that has a config.

    A replica loads only the plugin of its engine, because its interpreter may have no other.

    Attributes:
        config: as plain values, with absolute paths, without the sections of plugins.
        engine_owner: plugin of the engine; an owner is empty without such a part, and for the user's own code.
        sections: of plugins, by entry-point name; a process reads those of the plugins that it loads.
        wrapper_owners: plugins that wrap the engine, and plugins of the parts in their sections.
        given: objects that a program passes as parts, pickled: replicas need none of them, and may lack their modules.
    """

    config: JsonObject
    base_dir: str
    recipe: PluginRecipe
    engine_owner: str
    judge_owner: str = ""
    transport_owner: str = ""
    wrapper_owners: tuple[str, ...] = ()
    sections: JsonObject = field(factory=dict)
    given: bytes = b""

    @classmethod
    def of(cls, config: RunConfig, host: Host, given: Mapping[str, object] | None = None) -> ConfigBlueprint:
        """Return the blueprint of a resolved config, the loaded plugins, and the objects that a program passes."""
        transport = transport_choice(config, host)
        owner = _owner(host, "engines", config.engine)
        judge = _owner(host, "engines", config.judge.engine if config.judge else None)
        transport_owner = _owner(host, "weight_transports", transport)
        wrappers = tuple(dict.fromkeys(RunBuilder(config, host, None, given or {}).wrapper.owners_in_replicas()))
        config = with_absolute_paths(evolve(config, weight_transport=transport))
        plain, sections = to_dict(evolve(config, sections={})), config.sections
        owners = (owner, judge, transport_owner, wrappers)
        return cls(plain, str(config.base_dir), host.recipe(), *owners, sections, _pickled(given or {}))

    def make_engine(self) -> Engine:
        return self._builder("replica", self._pinned(self.engine_owner, *self.wrapper_owners)).build_engine()

    def make_judge_engine(self) -> Engine:
        engine = self._builder("replica", self._pinned(self.judge_owner)).build_judge_engine()
        if engine is None:
            raise ConfigError("no judge is configured")
        return engine

    def make_components(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerComponents:
        builder = self._builder("worker", self.recipe, judge, own_parts=True)
        # A part may be built in the driver and fail here, where another package or variable is missing.
        builder.build_agents()
        return builder.worker_components(engine, Observers.of(builder.build_observers(place="worker")))

    def make_reward(self, judge: EngineClient | None = None) -> Reward | None:
        return self._builder("reward_worker", self.recipe, judge, own_parts=True).reward

    def make_group_reward(self, judge: EngineClient | None = None) -> GroupReward | None:
        return self._builder("reward_worker", self.recipe, judge, own_parts=True).group_reward

    def make_router(self) -> Router:
        return self._builder("worker", self.recipe).build_router()

    def make_transport(self) -> WeightTransport:
        transport = self._builder("replica", self._pinned(self.transport_owner)).build_transport()
        if transport is None:
            raise ConfigError("no weight transport is configured")
        return transport

    def _pinned(self, *owners: str) -> PluginRecipe:
        # The version must still match the driver's, also in another interpreter.
        return PluginRecipe(
            allow=tuple(filter(None, owners)), pins=tuple(pin for pin in self.recipe.pins if pin.name in owners)
        )

    def _builder(
        self, role: Role, recipe: PluginRecipe, judge: EngineClient | None = None, *, own_parts: bool = False
    ) -> RunBuilder:
        # For every part again: an actor builds one to three parts, and only at its start.
        config = structure_config(dict(self.config), Path(self.base_dir))
        configure_logging(config.telemetry.log_level, config.telemetry.log_format)
        given = _unpickled(self.given) if own_parts and self.given else {}
        # A replica may lack the other plugins, and needs none of their sections.
        sections = {name: value for name, value in self.sections.items() if name in (recipe.allow or ())}
        config = evolve(config, base_dir=Path(self.base_dir), sections=sections)
        return RunBuilder(config, load(recipe), judge, given, role=role)


def _owner(host: Host, kind: str, choice: Choice | None) -> str:
    return "" if choice is None or choice.is_own_code else host.entry(kind, choice.name).owner


def _pickled(given: Mapping[str, object]) -> bytes:
    if not given:
        return b""
    import ray.cloudpickle

    dumps: Any = ray.cloudpickle.dumps  # without annotations
    try:
        return bytes(dumps(dict(given)))
    except Exception as error:
        raise ConfigError(f"{', '.join(given)}: cannot be sent to Ray's workers: {describe(error)}") from error


def _unpickled(given: bytes) -> dict[str, object]:
    import ray.cloudpickle

    return dict(ray.cloudpickle.loads(given))


def build_group_weights(builder: RunBuilder) -> GroupWeights:
    """Build the weight version and sleep state of the policy's replicas."""
    config = builder.config
    choice, transport = transport_choice(config, builder.host), builder.build_transport()
    if choice is None or transport is None:
        missing = "no weight transport: install a plugin that registers one, and set weight_transport"
        return GroupWeights(missing=missing, keep_last=config.weights.keep_last)
    updater = WeightUpdater(transport, choice.name, builder.make_weight_source, config.weights.timeout_s)
    return GroupWeights(updater, keep_last=config.weights.keep_last)
