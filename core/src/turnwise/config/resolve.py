"""
Plugin options: checks them against the classes that plugins registered, fills in defaults, and builds parts.

`load_resolved` is the door of every command: it reads the file and the overrides, loads the plugins, checks their
options, and reports all errors at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
from attrs import define, evolve, field

from turnwise.config.errors import dotted, located
from turnwise.config.file import read_config, structure_config
from turnwise.config.parts import KIND, Choice
from turnwise.config.run import JudgeConfig, RunConfig
from turnwise.config.structuring import structure, unstructure
from turnwise.errors import ConfigError, PluginError, TurnwiseError, describe
from turnwise.plugin.host import Host, Kind, load
from turnwise.protocols import Resources
from turnwise.types import JsonObject, PluginRecipe

S = TypeVar("S", RunConfig, JudgeConfig)


def load_resolved(source: str | Path | JsonObject, overrides: Iterable[str] = ()) -> tuple[RunConfig, Host]:
    """
    Read a run's config, load its plugins, and check every option.

    Args:
        source: a YAML or TOML file, or its content as a dict (see `load_config`).
        overrides: such as ``rollout.n=8``, applied in order.

    Returns:
        The config with the plugins' defaults filled in, and the loaded plugins.

    Raises:
        ConfigError: the file cannot be read, or values do not fit. The text has one line for each misfit; misfits of
            the core's keys and of plugin options come together.
        PluginError: a plugin that the config lists is missing or broken.
    """
    data, name, base_dir = read_config(source, overrides)
    with located(name):
        try:
            config = structure_config(data, base_dir)
        except ConfigError as error:
            # The user mends all misfits in one go, so the options of well-formed choices are checked as well.
            raise ConfigError("\n".join([str(error), *_misfits_of_choices(data, base_dir)])) from error
        host = load_plugins(config)
        return resolve(config, host), host


def load_plugins(config: RunConfig) -> Host:
    """Return a host with the plugins that the config allows."""
    return load(PluginRecipe(allow=config.plugins))


def resolve(config: RunConfig, host: Host) -> RunConfig:
    """
    Check every choice of a config against the plugin that registered it, and fill in that plugin's defaults.

    Relative paths among the options become absolute. Resolving twice changes nothing more.

    Raises:
        ConfigError: names are unknown or options do not fit; one line for each.
    """
    resolver = _Resolver(host, config.base_dir)
    resolved = resolver.section(config)
    if resolver.problems:
        raise ConfigError("\n".join(resolver.problems))
    return resolved


def _structure_options(host: Host, kind: Kind, choice: Choice, path: str, base_dir: Path | None) -> object:
    """Return the config object of a registered part; arguments and errors as in `build_part`."""
    try:
        entry = host.entry(kind, choice.name)
    except PluginError as error:
        raise PluginError(dotted(path, str(error))) from None
    return structure(choice.options, entry.config, path=path, base_dir=base_dir)


def build_part(
    host: Host, kind: Kind, choice: Choice | str, resources: Resources, *, path: str = "", base_dir: Path | None = None
) -> Any:
    """
    Build a registered part.

    Args:
        host: the loaded plugins.
        kind: which registry.
        choice: the registered name, with options or without.
        resources: handed to the part's factory.
        path: place of the choice in the config, for errors.
        base_dir: folder that relative paths among the options start from; None leaves them relative.

    Raises:
        PluginError: the name is unknown, or the factory raised something that is no `TurnwiseError`; those pass
            unchanged.
        ConfigError: the options do not fit; one line for each misfit.
    """
    chosen = Choice(choice) if isinstance(choice, str) else choice
    config = _structure_options(host, kind, chosen, path, base_dir)
    entry = host.entry(kind, chosen.name)
    try:
        return entry.factory(config, resources)
    except TurnwiseError:
        raise
    except Exception as error:
        part = f"{host.registry(kind).kind} {chosen.name!r} of plugin {entry.owner!r}"
        raise PluginError(f"{path or kind}: {part} cannot be built: {describe(error)}") from error


@define
class _Resolver:
    host: Host
    base_dir: Path
    problems: list[str] = field(factory=list, init=False)

    def section(self, section: S, prefix: str = "") -> S:
        kinds = _kinds(type(section))
        return evolve(section, **{n: self.value(getattr(section, n), kind, prefix + n) for n, kind in kinds.items()})

    def value(self, value: object, kind: Kind, path: str) -> Any:
        if isinstance(value, Choice):
            return self._choice(value, kind, path)
        if isinstance(value, JudgeConfig):
            return self.section(value, f"{path}.")
        if isinstance(value, Mapping):
            return {key: self.value(item, kind, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self.value(item, kind, f"{path}.{index}") for index, item in enumerate(value))
        return value

    def _choice(self, choice: Choice, kind: Kind, path: str) -> Choice:
        try:
            options = _structure_options(self.host, kind, choice, path, self.base_dir)
            return evolve(choice, options=unstructure(options))
        except (ConfigError, PluginError) as error:
            self.problems.append(str(error))
            return choice


def _kinds(section: type) -> dict[str, Kind]:
    """Return the fields of a config class that choose registered parts, with the registry of each."""
    return {item.name: item.metadata[KIND] for item in attrs.fields(section) if KIND in item.metadata}


def _misfits_of_choices(data: object, base_dir: Path) -> list[str]:
    """Return the misfits of plugin options in well-formed sections of a config that is not well-formed as a whole."""
    if not isinstance(data, Mapping):
        return []
    try:
        host = load(PluginRecipe(allow=structure(data.get("plugins"), attrs.fields(RunConfig).plugins.type)))
    except (ConfigError, PluginError):
        return []
    resolver = _Resolver(host, base_dir)
    attrs.resolve_types(RunConfig)
    for name, kind in _kinds(RunConfig).items():
        if name in data:
            try:
                resolver.value(structure(data[name], attrs.fields_dict(RunConfig)[name].type), kind, name)
            except ConfigError:
                continue  # reported with the misfits of the core's own keys
    return [line for problem in resolver.problems for line in problem.splitlines()]
