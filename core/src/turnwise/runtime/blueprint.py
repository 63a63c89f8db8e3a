"""What crosses a process border of a run: its config and the plugin recipe, and nothing that was built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from turnwise.config import RunConfig
from turnwise.config_file import anchored, structure_config, to_dict
from turnwise.config_parts import Choice
from turnwise.episode_setup import EngineClient
from turnwise.errors import ConfigError
from turnwise.host import Host, load
from turnwise.protocols import Engine, Resources, Reward, Router, WeightTransport
from turnwise.runtime.assembly import engine_of, judge_engine_of, observers_of, parts_of, resources_of, reward_of
from turnwise.runtime.weight_parts import transport_choice, transport_of
from turnwise.runtime.worker import WorkerParts
from turnwise.telemetry import Observers, configure_logging
from turnwise.types import PluginRecipe


@frozen
class ConfigBlueprint:
    """
    Builds the parts of a process from a run's config.

    Attributes:
        config: plain values, with absolute paths.
        base_dir: folder that the config came from.
        recipe: every plugin that the driver loaded, pinned.
        engine_owner: plugin of the engine: the only one that a replica loads, for its interpreter may hold no other.
        judge_owner: the same for the judge's engine; empty when there is no judge.
        transport_owner: the same for the weight transport; empty when there is none.
    """

    config: Mapping[str, Any]
    base_dir: str
    recipe: PluginRecipe
    engine_owner: str
    judge_owner: str = ""
    transport_owner: str = ""

    @classmethod
    def of(cls, config: RunConfig, host: Host) -> ConfigBlueprint:
        """Take down a resolved config and what the host has loaded."""
        owner = host.entry("engines", config.engine.name).owner
        judge = "" if config.judge is None else host.entry("engines", config.judge.engine.name).owner
        transport = transport_choice(config, host)
        carrier = "" if transport is None else host.entry("weight_transports", transport.name).owner
        return cls(to_dict(anchored(config)), str(config.base_dir), host.recipe(), owner, judge, carrier)

    def make_engine(self) -> Engine:
        """Build the engine of a replica; it is not started."""
        return engine_of(self._structured(), self._host_of(self.engine_owner))

    def make_judge_engine(self) -> Engine:
        """Build the engine of a judge's replica; it is not started."""
        engine = judge_engine_of(self._structured(), self._host_of(self.judge_owner))
        if engine is None:
            raise ConfigError("no judge is configured")
        return engine

    def make_parts(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerParts:
        """Build what a worker is made of, around the replicas, and those of the judge."""
        config, host = self._structured(), load(self.recipe)
        resources = resources_of(config, host, judge)
        observers = Observers.of(observers_of(config, host, resources, place="worker"))
        return parts_of(config, host, resources, engine, observers)

    def make_reward(self, judge: EngineClient | None = None) -> Reward | None:
        """Build the reward of a reward worker."""
        config, host = self._structured(), load(self.recipe)
        return reward_of(config, host, resources_of(config, host, judge))

    def make_router(self) -> Router:
        """Build a worker's router."""
        config, host = self._structured(), load(self.recipe)
        choice = config.router or Choice("least_tokens")
        router: Router = host.build("routers", choice.name, choice.options, Resources(), path="router")
        return router

    def make_transport(self) -> WeightTransport:
        """Build a replica's end of what carries weights."""
        config, host = self._structured(), self._host_of(self.transport_owner)
        transport = transport_of(config, host)
        if transport is None:
            raise ConfigError("no weight transport is configured")
        return transport

    def _host_of(self, owner: str) -> Host:
        pins = tuple(pin for pin in self.recipe.pins if pin.name == owner)
        return load(PluginRecipe(allow=(owner,), pins=pins))

    def _structured(self) -> RunConfig:
        config = structure_config(dict(self.config), Path(self.base_dir))
        configure_logging(config.telemetry.log_level, config.telemetry.log_format)
        return evolve(config, base_dir=Path(self.base_dir))
