"""The plugins of a run, as plain data that every process compares with its own plugins."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class PluginPin:
    """
    The plugin that the driver found, so that a worker can check that it has the same one.

    Attributes:
        name, module: name of the entry point, and the module that it loads.
        distribution, version: name and version of the installed distribution.
    """

    name: str
    module: str
    distribution: str
    version: str


@frozen(kw_only=True)
class PluginRecipe:
    """
    The names and versions of plugins to load; the only data of the plugin system that crosses a process border.

    Attributes:
        allow: entry-point names to load; None loads all that are installed.
        pins: the plugins as the driver found them; loading raises `PluginError` on a difference.
    """

    allow: tuple[str, ...] | None = None
    pins: tuple[PluginPin, ...] = ()
