"""
Sections of plugins: top-level keys of a config with the names of installed plugins.

The file's reader finds them by the names alone and imports no plugin; `turnwise.config.resolve` checks what is in them.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from turnwise.config.parts import Choice, file_fields
from turnwise.config.run import RunConfig
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError
from turnwise.plugin.host import Host
from turnwise.plugin.requirements import GROUP
from turnwise.types import JsonDict, JsonObject


def split_sections(data: JsonObject) -> tuple[JsonDict, JsonDict]:
    """Return a config without the sections of installed plugins, and these sections; a key of the core is none."""
    other = data.keys() - {item.name for item in file_fields(RunConfig)}
    installed = {point.name for point in entry_points(group=GROUP)} if other else set()
    sections = {name: data[name] for name in data if name in other & installed}
    return {name: value for name, value in data.items() if name not in sections}, sections


def enabled_plugins(config: RunConfig, host: Host) -> tuple[str, ...]:
    """Return the plugins whose hooks wrap parts of a run: they have a section, or `plugins` lists them."""
    named = {*config.sections, *(config.plugins or ())}
    return tuple(name for name in host.sections if name in named)


def section_choices(value: object, path: str) -> tuple[Choice, ...]:
    """Return a section that is a list of choices; `ConfigError` for another value."""
    found: tuple[Choice, ...] = structure(value, tuple[Choice, ...], path=path)
    return found


def check_section_name(name: str, host: Host) -> None:
    """Raise `ConfigError` for a section of a plugin that has none, or that is not loaded."""
    if name in host.sections:
        return
    broken = [plugin for plugin in host.broken if plugin.name == name]
    if broken:
        raise ConfigError(f"{name}: the section of a plugin that is broken: it {broken[0].error}")
    if name in host.skipped:
        raise ConfigError(f"{name}: the section of a plugin that is not loaded; add {name!r} to plugins")
    raise ConfigError(f"{name}: unknown key; the plugin {name!r} has no section")
