"""
Plugin options: checks them against the classes that plugins registered, fills in defaults, and builds parts.

`load_resolved` is the door of every command: it reads the file and the overrides, loads the plugins, checks their
options, and reports all errors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from attrs import define, evolve, field

from turnwise.config.errors import dotted, located
from turnwise.config.file import absolute_place, read_config, structure_config, with_absolute_code
from turnwise.config.own_code import OwnCode, build_own
from turnwise.config.parts import Choice
from turnwise.config.run import RunConfig, kinds_of, map_choices
from turnwise.config.sections import check_section_name, section_choices, split_sections
from turnwise.config.structuring import structure, unstructure
from turnwise.errors import ConfigError, PluginError, TurnwiseError, describe
from turnwise.plugin.host import Host, load
from turnwise.protocols import Resources
from turnwise.types import JsonObject, PluginRecipe


def load_resolved(source: str | Path | JsonObject, overrides: Iterable[str] = ()) -> tuple[RunConfig, Host]:
    """
    Read a run's config, load its plugins, and check every option.

    Args:
        source: a YAML or TOML file, or its content as a dict (see `load_config`).
        overrides: such as ``rollout.n=8``, applied in order.

    Returns:
        The config with the plugins' defaults filled in, and the loaded plugins.

    Raises:
        ConfigError: the file cannot be read, or values do not fit. The text has one line for each mismatch, in
            the core's keys and in plugin options.
        PluginError: a plugin that the config lists is missing or broken.
    """
    data, name, base_dir = read_config(source, overrides)
    with located(name):
        try:
            config = structure_config(data, base_dir)
        except ConfigError as error:
            # The user mends all mismatches in one go, so the options of well-formed choices are checked as well.
            raise ConfigError("\n".join([str(error), *_mismatches_of_choices(data, base_dir)])) from error
        host = load_plugins(config)
        return resolve(config, host), host


def load_plugins(config: RunConfig) -> Host:
    """Return a host with the plugins that the config allows."""
    return load(PluginRecipe(allow=config.plugins))


def resolve(config: RunConfig, host: Host) -> RunConfig:
    """
    Check every choice of a config against the plugin that registered it, and fill in that plugin's defaults.

    Relative paths among the options and of files with code become absolute. Resolving twice changes nothing more.

    Raises:
        ConfigError: names are unknown or options do not fit; one line for each.
    """
    resolver = _Resolver(host, OwnCode(base_dir=config.base_dir, modules=config.modules))
    resolved: RunConfig = map_choices(config, resolver.resolve)
    anchor = partial(absolute_place, config)
    sections = {name: resolver.resolve_section(name, value, anchor) for name, value in config.sections.items()}
    if resolver.problems:
        raise ConfigError("\n".join(resolver.problems))
    # A resumed run reads its config in another folder, and must find its agents under the same names.
    return with_absolute_code(evolve(resolved, sections=sections))


def _structure_options(host: Host, kind: str, choice: Choice, path: str, base_dir: Path | None) -> object:
    """Return the config object of a registered part; arguments and errors as in `build_part`."""
    try:
        entry = host.entry(kind, choice.name)
    except PluginError as error:
        raise PluginError(dotted(path, str(error))) from None
    try:
        return structure(choice.options, entry.config, path=path, base_dir=base_dir)
    except PluginError as error:
        raise PluginError(f"{host.part_label(kind, choice.name)}: {error}") from error


def build_part(
    host: Host, kind: str, choice: Choice | str, resources: Resources, *, path: str = "", code: OwnCode | None = None
) -> Any:
    """
    Build a part: a registered one, or one of the user's own code.

    Args:
        host: the loaded plugins.
        kind: which registry.
        choice: the registered name or the place, with options or without.
        resources: handed to the part's factory.
        path: place of the choice in the config, for errors.
        code: the user's own code that the run may use, and the folder that relative paths among the options start from;
            None is no code, and leaves the paths relative.

    Raises:
        PluginError: the name is unknown, the part does not fulfil its protocol, or the factory raised something that is
            no `TurnwiseError`; those pass unchanged.
        ConfigError: the options do not fit; one line for each mismatch. A factory's own error of the config gets the
            place and the part, unless its text names the part.
    """
    chosen = Choice(choice) if isinstance(choice, str) else choice
    if chosen.is_own_code:
        return build_own(host, kind, chosen, resources, path, code or OwnCode())
    config = _structure_options(host, kind, chosen, path, code.base_dir if code else None)
    try:
        part = host.entry(kind, chosen.name).factory(config, resources)
    except ConfigError as error:
        if not path or chosen.name in str(error):
            raise
        place = f"{path}: {host.part_label(kind, chosen.name)}"
        raise ConfigError("\n".join(f"{place}: {line}" for line in str(error).splitlines())) from error
    except TurnwiseError:
        raise
    except Exception as error:
        label = host.part_label(kind, chosen.name)
        raise PluginError(f"{path or kind}: {label} cannot be built: {describe(error)}") from error
    try:
        host.registry(kind).check(part)
    except PluginError as error:
        raise PluginError(f"{path or kind}: {host.part_label(kind, chosen.name)}: {error}") from None
    return part


@define
class _Resolver:
    host: Host
    code: OwnCode
    problems: list[str] = field(factory=list, init=False)

    def resolve(self, choice: Choice, kind: str, path: str) -> Choice:
        try:
            if choice.is_own_code:  # imported when it is built: reading runs no code
                self.code.check_allowed(choice.name, dotted(path, ""))
                return choice
            options = _structure_options(self.host, kind, choice, path, self.code.base_dir)
            return evolve(choice, options=unstructure(options))
        except (ConfigError, PluginError) as error:
            self.problems.append(str(error))
            return choice

    def resolve_section(self, name: str, value: object, anchor: Callable[[str], str] = str) -> object:
        """Return the section of a plugin, checked, as plain values; `anchor` makes the places of code absolute."""
        try:
            check_section_name(name, self.host)
            section = self.host.sections[name]
            if not section.kind:
                return unstructure(structure(value, section.options, path=name, base_dir=self.code.base_dir))
            choices = map_choices(section_choices(value, name), self.resolve, section.kind, name)
            return unstructure([evolve(each, name=anchor(each.name)) for each in choices])
        except (ConfigError, PluginError) as error:
            self.problems.append(str(error))
            return value


def _mismatches_of_choices(data: object, base_dir: Path) -> list[str]:
    """Return the mismatches of plugin options in the well-formed sections of a config that is not well-formed."""
    if not isinstance(data, Mapping):
        return []
    try:
        host = load(PluginRecipe(allow=structure(data.get("plugins"), attrs.fields(RunConfig).plugins.type)))
    except (ConfigError, PluginError):
        return []
    attrs.resolve_types(RunConfig)
    kinds, sections = kinds_of(RunConfig), {}
    for name in ("modules", *kinds):
        with suppress(ConfigError):  # reported with the mismatches of the core's own keys
            if name in data:
                sections[name] = structure(data[name], attrs.fields_dict(RunConfig)[name].type)
    resolver = _Resolver(host, OwnCode(base_dir=base_dir, modules=sections.pop("modules", ())))
    for name, value in sections.items():
        map_choices(value, resolver.resolve, kinds[name], name)
    for name, value in split_sections(data)[1].items():
        resolver.resolve_section(name, value)
    return [line for problem in resolver.problems for line in problem.splitlines()]
