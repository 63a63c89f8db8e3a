"""
Finds plugins and keeps their registrations: the only module that uses pluggy's manager.

`load` makes a `Host` from a `PluginRecipe` and the installed packages, in the driver and again in every worker. Nothing
here is global. Plugins are loaded in the order of their names, and their hooks are called one plugin at a time,
so that two machines with the same packages get the same host, and every error can name the plugin it is about.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, distributions, entry_points, requires
from types import ModuleType
from typing import Any, Final, Literal, get_args

import attrs
import pluggy
from attrs import evolve, field, frozen

from turnwise.errors import DuplicateNameError, PluginError, describe
from turnwise.events.observer import Observer
from turnwise.plugin import specs as hookspecs
from turnwise.plugin.registry import Entry, Registry, did_you_mean
from turnwise.protocols import (
    Agent,
    Command,
    Diagnostic,
    Engine,
    Interaction,
    Postprocessor,
    ReasoningParser,
    Reward,
    Router,
    Tool,
    ToolParser,
    WeightTransport,
)
from turnwise.types import PluginPin, PluginRecipe

GROUP: Final = "turnwise"
BUILTINS: Final = "builtins"
ALLOW_VARIABLE: Final = "TURNWISE_PLUGINS"

Kind = Literal[
    "agents",
    "commands",
    "diagnostics",
    "engines",
    "interactions",
    "observers",
    "postprocessors",
    "reasoning_parsers",
    "rewards",
    "routers",
    "tool_parsers",
    "tools",
    "weight_transports",
]
"""A registry of a `Host`; the hook that fills it is ``register_KIND``."""
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_HOOKS: Final = tuple(f"register_{kind}" for kind in KINDS)


@frozen(kw_only=True)
class LoadedPlugin(PluginPin):
    """
    A plugin that was found.

    Attributes:
        state: `ok`, or `broken` when it cannot be imported.
        error: why it is broken, on one line.
        registers: the names it registered, by the host's registry.
    """

    state: Literal["ok", "broken"] = "ok"
    error: str = ""
    registers: Mapping[str, tuple[str, ...]] = field(factory=dict)

    @property
    def source(self) -> str:
        """The distribution, version and module, for error texts."""
        return f"{self.distribution} {self.version} (module {self.module})"

    @property
    def pin(self) -> PluginPin:
        """The pin that a worker compares with its own installation."""
        return PluginPin(name=self.name, module=self.module, distribution=self.distribution, version=self.version)


@frozen(kw_only=True, eq=False)
class Host:
    """
    Registrations of the plugins in this process. Make one with `load`.

    Attributes:
        plugins: every plugin that was asked for or is installed, sorted by name; broken ones too.
        skipped: names of plugins that are installed and were not allowed.
        engines: and so on: one registry for each hook.
    """

    plugins: tuple[LoadedPlugin, ...] = ()
    skipped: tuple[str, ...] = ()
    engines: Registry[Engine] = field(factory=lambda: Registry("engine"))
    tool_parsers: Registry[ToolParser] = field(factory=lambda: Registry("tool parser"))
    reasoning_parsers: Registry[ReasoningParser] = field(factory=lambda: Registry("reasoning parser"))
    agents: Registry[Agent] = field(factory=lambda: Registry("agent"))
    tools: Registry[Tool | tuple[Tool, ...]] = field(factory=lambda: Registry("tool"))
    interactions: Registry[Interaction] = field(factory=lambda: Registry("interaction"))
    rewards: Registry[Reward] = field(factory=lambda: Registry("reward"))
    postprocessors: Registry[Postprocessor] = field(factory=lambda: Registry("postprocessor"))
    routers: Registry[Router] = field(factory=lambda: Registry("router"))
    weight_transports: Registry[WeightTransport] = field(factory=lambda: Registry("weight transport"))
    observers: Registry[Observer] = field(factory=lambda: Registry("observer"))
    commands: Registry[Command] = field(factory=lambda: Registry("command"))
    diagnostics: Registry[Diagnostic] = field(factory=lambda: Registry("diagnostic"))

    @property
    def broken(self) -> tuple[LoadedPlugin, ...]:
        """Installed plugins that cannot be imported."""
        return tuple(plugin for plugin in self.plugins if plugin.state == "broken")

    def recipe(self) -> PluginRecipe:
        """Return a recipe that rebuilds this host in another process and rejects a mismatch."""
        loaded = [plugin for plugin in self.plugins if plugin.state == "ok"]
        return PluginRecipe(allow=tuple(plugin.name for plugin in loaded), pins=tuple(plugin.pin for plugin in loaded))

    def registry(self, kind: Kind) -> Registry[Any]:
        """Return a registry by its name."""
        registry: Registry[Any] = getattr(self, kind)
        return registry

    def entry(self, kind: Kind, name: str) -> Entry[Any]:
        """Return the entry of a name; `PluginError` suggests another, and names plugins that are broken or left out."""
        try:
            return self.registry(kind).get(name)
        except PluginError as error:
            broken = "".join(f"; plugin {plugin.name!r} is broken: {plugin.error}" for plugin in self.broken)
            skipped = f"; installed but not loaded: {', '.join(self.skipped)}" if self.skipped else ""
            raise PluginError(f"{error}{broken}{skipped}{_install_hint(name)}") from None


def _install_hint(part: str) -> str:
    """Return the end of an error text: the missing package that turnwise's extra with the name of a part requires."""
    extra = part.replace("_", "-")
    pattern = re.compile(rf"""(turnwise-[\w-]+)(\[[\w,-]+\])?.*; extra == ['"]{re.escape(extra)}['"]""")
    found = [match for line in requires(GROUP) or () if (match := pattern.fullmatch(line))]
    missing = [f"{match[1]}{match[2] or ''}" for match in found if not any(distributions(name=match[1]))]
    return f"; to install it: pip install '{missing[0]}'" if missing else ""


def load(recipe: PluginRecipe | None = None) -> Host:
    """
    Find and import plugins, and let them register.

    Which ones: the recipe's allow-list, or its pins; else the names in the environment variable ``TURNWISE_PLUGINS``,
    separated by commas, where an empty value means none; else every plugin that is installed. The core's own is always
    loaded.

    Args:
        recipe: the plugins to load, with the driver's versions where there is a driver.

    Raises:
        PluginError: a plugin that was asked for is not installed, differs from its pin or cannot be imported; or any
            plugin has a hook that does not exist, that raises, or that registers something without a config class.
        DuplicateNameError: two distributions have a plugin of one name, or two plugins register one name.
    """
    recipe = recipe or PluginRecipe()
    allow = _allowed(recipe)
    installed = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    points = _chosen(installed, allow)
    _check_pins(recipe.pins, [_found(point) for point in points])
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    host = Host(skipped=tuple(sorted({point.name for point in installed} - {point.name for point in points})))
    plugins = [_loaded(point, manager, host, required=allow is not None or point.name == BUILTINS) for point in points]
    manager.check_pending()
    return evolve(host, plugins=tuple(plugins))


def _allowed(recipe: PluginRecipe) -> frozenset[str] | None:
    if recipe.allow is not None:
        names: Iterable[str] = recipe.allow
    elif recipe.pins:
        names = (pin.name for pin in recipe.pins)
    elif (value := os.environ.get(ALLOW_VARIABLE)) is not None:
        names = (name.strip() for name in value.split(",") if name.strip())
    else:
        return None
    return frozenset({BUILTINS, *names})


def _chosen(installed: list[EntryPoint], allow: frozenset[str] | None) -> list[EntryPoint]:
    chosen: dict[str, EntryPoint] = {}
    for point in installed:
        if allow is not None and point.name not in allow:
            continue
        if point.name in chosen:
            owners = " and ".join(_found(each).source for each in (chosen[point.name], point))
            raise DuplicateNameError(f"two distributions have a plugin {point.name!r}: {owners}; uninstall one")
        chosen[point.name] = point
    known = tuple(sorted({point.name for point in installed}))
    for name in sorted((allow or frozenset()) - set(chosen)):
        raise PluginError(f"plugin {name!r} is not installed{did_you_mean(name, known)}")
    return list(chosen.values())


def _found(point: EntryPoint) -> LoadedPlugin:
    distribution = point.dist
    name, version = ("", "") if distribution is None else (distribution.name, distribution.version)
    return LoadedPlugin(name=point.name, module=point.value, distribution=name, version=version)


def _check_pins(pins: tuple[PluginPin, ...], found: list[LoadedPlugin]) -> None:
    """Compare before anything is imported: another version's code must not run."""
    if not pins:
        return
    here = {plugin.name: plugin.source for plugin in found}
    there = {pin.name: LoadedPlugin(**attrs.asdict(pin)).source for pin in pins}
    # A recipe written by hand need not mention the core's own plugin.
    names = sorted((here.keys() | there.keys()) - ({BUILTINS} - there.keys()))
    different = [
        f"{name!r} is {here.get(name, 'not loaded')} here and {there.get(name, 'not loaded')} in the driver"
        for name in names
        if here.get(name) != there.get(name)
    ]
    if different:
        raise PluginError(f"plugins differ from the driver's: {'; '.join(different)}")


def _loaded(point: EntryPoint, manager: pluggy.PluginManager, host: Host, *, required: bool) -> LoadedPlugin:
    plugin = _found(point)
    try:
        module = point.load()
    except (Exception, SystemExit) as error:
        if required:
            raise PluginError(
                f"plugin {plugin.name!r} of {plugin.source} cannot be imported: {describe(error)}"
            ) from error
        return evolve(plugin, state="broken", error=describe(error))
    _check_hooks(module, plugin.name, manager)
    registers = {kind: _register(kind, plugin.name, manager, host) for kind in KINDS}
    return evolve(plugin, registers={kind: names for kind, names in registers.items() if names})


def _check_hooks(module: ModuleType, name: str, manager: pluggy.PluginManager) -> None:
    """Register a plugin with pluggy; refuse functions that pluggy would never call."""
    try:
        manager.register(module, name=name)
    except (ValueError, pluggy.PluginValidationError) as error:
        raise PluginError(f"plugin {name!r} cannot be registered: {describe(error)}") from error
    for caller in manager.get_hookcallers(module) or ():
        if not caller.has_spec() and not all(each.optionalhook for each in caller.get_hookimpls()):
            raise PluginError(f"plugin {name!r} has an unknown hook {caller.name!r}{did_you_mean(caller.name, _HOOKS)}")
    for hook in _HOOKS:
        function = getattr(module, hook, None)
        # The specifications have these names too, and a plugin may import them.
        marked = hasattr(function, f"{GROUP}_impl") or hasattr(function, f"{GROUP}_spec")
        if inspect.isroutine(function) and not marked:
            raise PluginError(f"plugin {name!r} has a function {hook!r} that is not marked with @turnwise.hookimpl")


def _register(kind: Kind, name: str, manager: pluggy.PluginManager, host: Host) -> tuple[str, ...]:
    """Call a plugin's hook, if it has it, and return the names that it registered."""
    registry = host.registry(kind)
    hook = f"register_{kind}"
    for each in getattr(manager.hook, hook).get_hookimpls():
        if each.plugin_name == name:
            _call(each, registry, f"hook {hook!r} of plugin {name!r}")
    entries = [entry for entry in registry.entries().values() if entry.owner == name]
    for entry in entries:
        if not attrs.has(entry.config) or "name" in attrs.fields_dict(entry.config):
            part = f"{registry.kind} {entry.name!r} of plugin {name!r}"
            raise PluginError(f"{part}: expected an attrs class without a field 'name' as config, got {entry.config!r}")
    return tuple(entry.name for entry in entries)


def _call(implementation: pluggy.HookImpl, registry: Registry[object], where: str) -> None:
    function = implementation.function
    # pluggy would call these without running them, and without an error.
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise PluginError(f"{where}: expected a plain function, neither async nor a wrapper")
    try:
        with registry.owned_by(implementation.plugin_name):
            function(*(registry for _ in implementation.argnames))
    except DuplicateNameError:
        raise
    except Exception as error:
        raise PluginError(f"{where} raised {describe(error)}") from error
