"""
Finds plugins and keeps what they registered: the only module that uses pluggy's manager.

`load` makes a `Host` from nothing but a `PluginRecipe` and what is installed, in the driver and again in every worker;
nothing here is global. Plugins are loaded in the order of their names, and their hooks are called one plugin at a time,
so that two machines with the same packages get the same host, and every error can name the plugin it is about.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, Literal, get_args

import attrs
import pluggy
from attrs import define, evolve, field, frozen

from turnwise import hookspecs
from turnwise.config import JudgeConfig, RunConfig
from turnwise.config_parts import KIND, Choice
from turnwise.config_structure import structure, unstructure
from turnwise.errors import ConfigError, DuplicateNameError, PluginError, TurnwiseError
from turnwise.observer import Observer
from turnwise.protocols import (
    Agent,
    Command,
    Engine,
    Interaction,
    Postprocessor,
    Resources,
    Reward,
    Router,
    Tool,
    ToolParser,
    WeightTransport,
)
from turnwise.registry import Entry, Registry, did_you_mean
from turnwise.types import PluginPin, PluginRecipe

GROUP: Final = "turnwise"
BUILTINS: Final = "builtins"
ALLOW_VARIABLE: Final = "TURNWISE_PLUGINS"

Kind = Literal[
    "agents",
    "commands",
    "engines",
    "interactions",
    "observers",
    "postprocessors",
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
class LoadedPlugin:
    """
    A plugin that was found.

    Attributes:
        name: entry-point name.
        module: what the entry point loads.
        distribution: name of the installed distribution.
        version: its version.
        state: `ok`, or `broken` when it cannot be imported.
        error: why it is broken, on one line.
        registers: the names it registered, by the host's registry.
    """

    name: str
    module: str
    distribution: str
    version: str
    state: Literal["ok", "broken"] = "ok"
    error: str = ""
    registers: Mapping[str, tuple[str, ...]] = field(factory=dict)

    @property
    def source(self) -> str:
        """Where it comes from, for texts."""
        return f"{self.distribution} {self.version} (module {self.module})"

    @property
    def pin(self) -> PluginPin:
        """What a worker must find as well."""
        return PluginPin(name=self.name, module=self.module, distribution=self.distribution, version=self.version)


@frozen(kw_only=True, eq=False)
class Host:
    """
    What the plugins of this process registered. Make one with `load`.

    Attributes:
        plugins: every plugin that was asked for or is installed, sorted by name; broken ones too.
        skipped: names of plugins that are installed and were not allowed.
        engines: and so on: one registry for each hook.
    """

    plugins: tuple[LoadedPlugin, ...] = ()
    skipped: tuple[str, ...] = ()
    engines: Registry[Engine] = field(factory=lambda: Registry("engine"))
    tool_parsers: Registry[ToolParser] = field(factory=lambda: Registry("tool parser"))
    agents: Registry[Agent] = field(factory=lambda: Registry("agent"))
    tools: Registry[Tool] = field(factory=lambda: Registry("tool"))
    interactions: Registry[Interaction] = field(factory=lambda: Registry("interaction"))
    rewards: Registry[Reward] = field(factory=lambda: Registry("reward"))
    postprocessors: Registry[Postprocessor] = field(factory=lambda: Registry("postprocessor"))
    routers: Registry[Router] = field(factory=lambda: Registry("router"))
    weight_transports: Registry[WeightTransport] = field(factory=lambda: Registry("weight transport"))
    observers: Registry[Observer] = field(factory=lambda: Registry("observer"))
    commands: Registry[Command] = field(factory=lambda: Registry("command"))

    @property
    def broken(self) -> tuple[LoadedPlugin, ...]:
        """Installed plugins that cannot be imported."""
        return tuple(plugin for plugin in self.plugins if plugin.state == "broken")

    def recipe(self) -> PluginRecipe:
        """Return what makes this host again in another process, and fails where that would be another one."""
        loaded = [plugin for plugin in self.plugins if plugin.state == "ok"]
        return PluginRecipe(allow=tuple(plugin.name for plugin in loaded), pins=tuple(plugin.pin for plugin in loaded))

    def registry(self, kind: Kind) -> Registry[Any]:
        """Return a registry by its name."""
        registry: Registry[Any] = getattr(self, kind)
        return registry

    def entry(self, kind: Kind, name: str) -> Entry[Any]:
        """
        Return what is registered under a name.

        Raises:
            PluginError: nothing is; the text has a did-you-mean, and the plugins that could have registered it but are
                broken or were not allowed.
        """
        try:
            return self.registry(kind).get(name)
        except PluginError as error:
            raise PluginError(f"{error}{self._absent()}") from None

    def _absent(self) -> str:
        broken = "".join(f"; plugin {plugin.name!r} is broken: {plugin.error}" for plugin in self.broken)
        return broken + (f"; installed but not loaded: {', '.join(self.skipped)}" if self.skipped else "")

    def options(
        self, kind: Kind, name: str, options: Mapping[str, Any], *, path: str = "", base_dir: Path | None = None
    ) -> Any:
        """
        Return the config object of a registered part, without building the part.

        Args:
            kind: which registry.
            name: of the part.
            options: plain values, as a config file held them.
            path: where the name and the options stand in the config, for errors.
            base_dir: folder that relative paths among the options start from.

        Raises:
            PluginError: the name is unknown.
            ConfigError: the options do not fit; one line for each misfit.
        """
        try:
            entry = self.entry(kind, name)
        except PluginError as error:
            raise PluginError(f"{path}: {error}" if path else str(error)) from None
        config: Any = structure(options, entry.config, path=path, base_dir=base_dir)
        if base_dir is None:
            return config
        # A relative path means the same as a default as it does written in the file.
        return structure(unstructure(config), entry.config, path=path, base_dir=base_dir)

    def build(
        self,
        kind: Kind,
        name: str,
        options: Mapping[str, Any],
        resources: Resources,
        *,
        path: str = "",
        base_dir: Path | None = None,
    ) -> Any:
        """
        Build a registered part; the arguments and errors are those of `options`, and the resources go to its factory.

        Raises:
            PluginError: the factory raised something that is no `TurnwiseError`; those pass unchanged.
        """
        config = self.options(kind, name, options, path=path, base_dir=base_dir)
        entry = self.entry(kind, name)
        try:
            return entry.factory(config, resources)
        except TurnwiseError:
            raise
        except Exception as error:
            what = f"{self.registry(kind).kind} {name!r} of plugin {entry.owner!r}"
            raise PluginError(f"{path or kind}: {what} cannot be built: {_one_line(error)}") from error


def load(recipe: PluginRecipe | None = None) -> Host:
    """
    Find and import plugins, and let them register.

    Which ones: the recipe's allow-list, or its pins; else the names in the environment variable ``TURNWISE_PLUGINS``,
    separated by commas, where an empty value means none; else every plugin that is installed. The core's own is always
    loaded.

    Args:
        recipe: which plugins, and perhaps what they were in the driver.

    Raises:
        PluginError: a plugin that was asked for is not installed, differs from its pin or cannot be imported; or any
            plugin has a hook that does not exist, that raises, or that registers what cannot be configured.
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
    known = sorted({point.name for point in installed})
    for name in sorted((allow or frozenset()) - set(chosen)):
        close = get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise PluginError(f"plugin {name!r} is not installed; installed: {', '.join(known) or 'none'}{hint}")
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
    # Who pins by hand need not know of the core's own plugin.
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
                f"plugin {plugin.name!r} of {plugin.source} cannot be imported: {_one_line(error)}"
            ) from error
        return evolve(plugin, state="broken", error=_one_line(error))
    _check_hooks(module, plugin.name, manager)
    registers = {kind: _register(kind, plugin.name, manager, host) for kind in KINDS}
    return evolve(plugin, registers={kind: names for kind, names in registers.items() if names})


def _check_hooks(module: Any, name: str, manager: pluggy.PluginManager) -> None:
    """Hand a plugin to pluggy; refuse what pluggy would never call."""
    try:
        manager.register(module, name=name)
    except (ValueError, pluggy.PluginValidationError) as error:
        raise PluginError(f"plugin {name!r} cannot be registered: {_one_line(error)}") from error
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
            what = f"{registry.kind} {entry.name!r} of plugin {name!r}"
            raise PluginError(f"{what}: expected an attrs class without a field 'name' as config, got {entry.config!r}")
    return tuple(entry.name for entry in entries)


def _call(implementation: pluggy.HookImpl, registry: Registry[Any], where: str) -> None:
    function = implementation.function
    # A call of these would do nothing, and say nothing.
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise PluginError(f"{where}: expected a plain function, neither async nor a wrapper")
    try:
        with registry.owned_by(implementation.plugin_name):
            function(*(registry for _ in implementation.argnames))
    except DuplicateNameError:
        raise
    except Exception as error:
        raise PluginError(f"{where} raised {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def resolve(config: RunConfig, host: Host) -> RunConfig:
    """
    Check every choice of a config against the plugin that registered it, and fill in that plugin's defaults.

    Relative paths among the options become absolute. Resolving twice changes nothing more.

    Raises:
        ConfigError: names are unknown or options do not fit; one line for each.
    """
    resolver = _Resolver(host, config.base_dir)
    resolved: RunConfig = resolver.section(config)
    if resolver.problems:
        raise ConfigError("\n".join(resolver.problems))
    return resolved


@define
class _Resolver:
    host: Host
    base_dir: Path
    problems: list[str] = field(factory=list, init=False)

    def section(self, section: Any, prefix: str = "") -> Any:
        kinds = {item.name: item.metadata[KIND] for item in attrs.fields(type(section)) if KIND in item.metadata}
        return evolve(section, **{n: self.value(getattr(section, n), kind, prefix + n) for n, kind in kinds.items()})

    def value(self, value: Any, kind: Kind, path: str) -> Any:
        if isinstance(value, Choice | JudgeConfig):
            return self._choice(value, kind, path) if isinstance(value, Choice) else self.section(value, f"{path}.")
        if isinstance(value, Mapping):
            return {key: self.value(item, kind, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self.value(item, kind, f"{path}.{index}") for index, item in enumerate(value))
        return value

    def _choice(self, choice: Choice, kind: Kind, path: str) -> Choice:
        try:
            options = self.host.options(kind, choice.name, choice.options, path=path, base_dir=self.base_dir)
            return evolve(choice, options=unstructure(options))
        except (ConfigError, PluginError) as error:
            self.problems.append(str(error))
            return choice
