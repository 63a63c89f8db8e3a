"""What crosses a process border of a run: its config and the plugin recipe, and nothing that was built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from turnwise.config import Choice, RunConfig
from turnwise.config_file import anchored, structure_config, to_dict
from turnwise.episode_setup import EngineClient
from turnwise.host import Host, load
from turnwise.protocols import Engine, Resources, Router
from turnwise.runtime.assembly import engine_of, observers_of, parts_of, resources_of
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
    """

    config: Mapping[str, Any]
    base_dir: str
    recipe: PluginRecipe
    engine_owner: str

    @classmethod
    def of(cls, config: RunConfig, host: Host) -> ConfigBlueprint:
        """Take down a resolved config and what the host has loaded."""
        owner = host.entry("engines", config.engine.name).owner
        return cls(to_dict(anchored(config)), str(config.base_dir), host.recipe(), owner)

    def make_engine(self) -> Engine:
        """Build the engine of a replica; it is not started."""
        config = self._structured()
        pins = tuple(pin for pin in self.recipe.pins if pin.name == self.engine_owner)
        return engine_of(config, load(PluginRecipe(allow=(self.engine_owner,), pins=pins)))

    def make_parts(self, engine: EngineClient) -> WorkerParts:
        """Build what a worker is made of, around the replicas."""
        config, host = self._structured(), load(self.recipe)
        resources = resources_of(config, host)
        observers = Observers.of(observers_of(config, host, resources))
        return parts_of(config, host, resources, engine, observers)

    def make_router(self) -> Router:
        """Build a worker's router."""
        config, host = self._structured(), load(self.recipe)
        choice = config.router or Choice("least_tokens")
        router: Router = host.build("routers", choice.name, choice.options, Resources(), path="router")
        return router

    def _structured(self) -> RunConfig:
        config = structure_config(dict(self.config), Path(self.base_dir))
        configure_logging(config.telemetry.log_level, config.telemetry.log_format)
        return evolve(config, base_dir=Path(self.base_dir))
