"""
Finds plugins and keeps their registrations: the only module that uses pluggy's manager.

`load` makes a `Host` from a `PluginRecipe` and the installed packages, in the driver and again in every worker. Nothing
here is global. Plugins are loaded in the order of their names, and their hooks are called one plugin at a time,
so that two machines with the same packages get the same host, and every error can name the plugin it is about.

A bad plugin fails only the runs that need it: it is listed as broken and registers nothing.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, Literal

import attrs
import pluggy
from attrs import define, evolve, field, frozen

from turnwise.errors import DuplicateNameError, PluginError, describe
from turnwise.plugin import specs as hookspecs
from turnwise.plugin.hook_checks import check_hooks
from turnwise.plugin.kinds import CORE, HookSpecs, Section
from turnwise.plugin.registry import Entry, Registry, did_you_mean
from turnwise.plugin.requirements import GROUP, InstalledDistributions, plugin_points
from turnwise.plugin.wrapping import CONFIG_SECTION, WRAPPED, Wrapping, noun_of
from turnwise.types import PluginPin, PluginRecipe

BUILTINS: Final = CORE
ALLOW_VARIABLE: Final = "TURNWISE_PLUGINS"

KINDS: Final = tuple(hookspecs.core_kinds().kinds)
"""The kinds of the core, sorted; the hook that fills the registry of one is ``register_KIND``."""


@frozen(kw_only=True)
class LoadedPlugin(PluginPin):
    """
    A plugin that was found.

    Attributes:
        state: `ok`, or `broken` when it cannot be used.
        error: why it is broken, on one line with the hint.
        registers: the names it registered, by the host's registry.
        wraps: the kinds of parts that its hooks wrap.
        section: its own section of a config; None if it has none.
    """

    state: Literal["ok", "broken"] = "ok"
    error: str = ""
    registers: Mapping[str, tuple[str, ...]] = field(factory=dict)
    wraps: tuple[str, ...] = ()
    section: Section | None = None

    @property
    def source(self) -> str:
        """The distribution, version and module, for error texts."""
        return f"{self.distribution} {self.version} (module {self.module})"

    @property
    def hint(self) -> str:
        """The end of an error text: the ways to continue without the plugin."""
        others = f"leave {self.name!r} out of {ALLOW_VARIABLE} and of the config's plugins"
        return f"; to continue without it: pip uninstall {self.distribution or self.name}, or {others}"

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
        specs: the kinds of parts, with their registries: those of the core, and the added ones.
        wrapping: the hooks that wrap parts.
    """

    plugins: tuple[LoadedPlugin, ...] = ()
    skipped: tuple[str, ...] = ()
    specs: HookSpecs = field(factory=hookspecs.core_kinds)
    wrapping: Wrapping = field(factory=lambda: Wrapping(_make_manager()))

    @property
    def broken(self) -> tuple[LoadedPlugin, ...]:
        """Installed plugins that cannot be used."""
        return tuple(plugin for plugin in self.plugins if plugin.state == "broken")

    @property
    def sections(self) -> dict[str, Section]:
        """The sections that plugins have in a config, by the plugin."""
        return {plugin.name: plugin.section for plugin in self.plugins if plugin.section is not None}

    def recipe(self) -> PluginRecipe:
        """Return a recipe that rebuilds this host in another process and rejects a mismatch."""
        loaded = [plugin for plugin in self.plugins if plugin.state == "ok"]
        return PluginRecipe(allow=tuple(plugin.name for plugin in loaded), pins=tuple(plugin.pin for plugin in loaded))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of all registries: first those of the core, then the added ones, sorted."""
        return *KINDS, *sorted(self.specs.kinds.keys() - {*KINDS})

    def registry(self, kind: str) -> Registry[Any]:
        """Return the registry of a kind, such as `engines`."""
        return self.specs.kinds[kind].registry

    def entry(self, kind: str, name: str) -> Entry[Any]:
        """
        Return the entry of a name.

        Raises:
            DuplicateNameError: several plugins register the name.
            PluginError: none does; the text suggests another name, and names plugins that are broken or left out.
        """
        try:
            return self.registry(kind).get(name)
        except DuplicateNameError as error:
            sources = "; ".join(map(self.source_of, self.registry(kind).owners(name)))
            raise DuplicateNameError(
                f"{error} ({sources}); uninstall one, or leave it out of {ALLOW_VARIABLE}"
            ) from None
        except PluginError as error:
            raise PluginError(f"{error}{self.hints(name)}") from None

    def hints(self, name: str) -> str:
        """Return the end of an error about a missing part: the plugin that is not loaded, and a package to install."""
        broken = "".join(f"; plugin {plugin.name!r} is broken, it {plugin.error}" for plugin in self.broken)
        distributions = InstalledDistributions()
        return f"{broken}{distributions.load_hint(name, self.skipped)}{distributions.install_hint(name)}"

    def source_of(self, owner: str) -> str:
        """Return the name of a plugin with its distribution, version and module, for error texts."""
        found = [plugin for plugin in self.plugins if plugin.name == owner]
        return f"{owner!r} of {found[0].source}" if found else repr(owner)

    def part_label(self, kind: str, name: str) -> str:
        """Return a registered part with its plugin, for error texts."""
        registry = self.registry(kind)
        return f"{registry.kind} {name!r} of plugin {self.source_of(registry.get(name).owner)}"


def load(recipe: PluginRecipe | None = None) -> Host:
    """
    Find and import plugins, and let them register.

    Which ones: the recipe's allow-list, or its pins; else the names in the environment variable ``TURNWISE_PLUGINS``,
    separated by commas, where an empty value means none; else every plugin that is installed. The core's own is always
    loaded.

    Args:
        recipe: the plugins to load, with the driver's versions where there is a driver.

    Other plugins are broken if they cannot be used, and a name that two of them register belongs to neither.

    Raises:
        PluginError: a plugin that was asked for is not installed, differs from its pin, or is broken.
        DuplicateNameError: two distributions have a plugin of a name that was asked for.
    """
    recipe = recipe or PluginRecipe()
    allow = _allowed(recipe)
    installed = sorted(plugin_points(), key=lambda point: point.name)
    chosen = [point for point in installed if allow is None or point.name in allow]
    known = tuple(sorted({point.name for point in installed}))
    for name in sorted((allow or frozenset()) - {point.name for point in chosen}):
        raise PluginError(f"plugin {name!r} is not installed{did_you_mean(name, known)}")
    distributions = InstalledDistributions()
    found = [_Found(point, _described(point, distributions)) for point in chosen]
    _check_pins(recipe.pins, [each.plugin for each in found])
    host = Host(skipped=tuple(sorted(set(known) - {point.name for point in chosen})))
    by_name = defaultdict(list)
    for each in found:
        by_name[each.plugin.name].append(each)
    loading = _Loading(host=host, found=by_name, required={BUILTINS, *(allow or ())}, distributions=distributions)
    loading.run()
    return evolve(host, plugins=tuple(loading.plugins.values()))


@frozen
class _Found:
    """An entry point, and the plugin that it names."""

    point: EntryPoint
    plugin: LoadedPlugin


@define(eq=False, kw_only=True)
class _Loading:
    """Imports plugins, and lets them register. An unusable plugin is marked as broken, or is an error if required."""

    host: Host
    found: Mapping[str, list[_Found]]
    required: set[str]
    distributions: InstalledDistributions
    plugins: dict[str, LoadedPlugin] = field(init=False)
    _modules: dict[str, object] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.plugins = {name: found[0].plugin for name, found in self.found.items()}

    @property
    def _manager(self) -> pluggy.PluginManager:
        return self.host.wrapping.manager

    def run(self) -> None:
        # First all of them add their hooks, so that the order of the names does not matter.
        for name in self.found:
            self._attempt(name, self._import)
        if self.host.specs.kinds.keys() - {*KINDS}:  # pluggy refuses a module without a hook
            self._manager.add_hookspecs(self.host.specs.as_module())
        for name in list(self._modules):
            self._attempt(name, self._register)

    def _attempt(self, name: str, step: Callable[[str], None]) -> None:
        try:
            # A plugin may print when it is imported, and the output of a command belongs to the command.
            with redirect_stdout(sys.stderr):
                step(name)
        except PluginError as error:
            plugin = self.plugins[name]
            if name in self.required:
                raise type(error)(f"plugin {name!r} of {plugin.source} {error}{plugin.hint}") from error
            for registry in map(self.host.registry, self.host.kinds):
                registry.remove(name)
            self.host.specs.remove(name)
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            self._modules.pop(name, None)
            self.plugins[name] = evolve(plugin, state="broken", error=str(error))

    def _import(self, name: str) -> None:
        self._modules[name] = module = _imported(self.found[name], self.distributions)
        self.host.specs.collect(module, name)

    def _register(self, name: str) -> None:
        hooks = check_hooks(self._modules[name], name, self._manager, self.host.kinds)
        callers = {kind: hooks.get(f"register_{kind}") for kind in self.host.kinds}
        registers = {kind: _register(kind, name, caller, self.host) for kind, caller in callers.items() if caller}
        registers = {kind: names for kind, names in registers.items() if names}
        wraps = tuple(kind for kind in WRAPPED if f"wrap_{noun_of(kind)}" in hooks)
        section = self.host.wrapping.section(name) if wraps or CONFIG_SECTION in hooks else None
        if section is not None:
            _check_section(section, name, self.host)
        self.plugins[name] = evolve(self.plugins[name], registers=registers, wraps=wraps, section=section)


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


def _described(point: EntryPoint, distributions: InstalledDistributions) -> LoadedPlugin:
    facts = distributions.describe(point.dist)
    return LoadedPlugin(name=point.name, module=point.value, distribution=facts.name, version=facts.version)


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


def _imported(found: list[_Found], distributions: InstalledDistributions) -> object:
    plugin = found[0].plugin
    if len(found) > 1:
        # Which one would be kept follows the order of directories, so neither is.
        owners = " and ".join(each.plugin.source for each in found)
        raise DuplicateNameError(f"has a name that two distributions use: {owners}; uninstall one")
    if plugin.name != BUILTINS and (wrong := next(distributions.unmet_requirements(plugin.distribution, GROUP), "")):
        raise PluginError(f"needs {wrong}")
    try:
        return found[0].point.load()
    except (Exception, SystemExit) as error:
        missing = "".join(f"; it needs {text}" for text in distributions.unmet_requirements(plugin.distribution))
        raise PluginError(f"cannot be imported: {describe(error)}{missing}") from error


class _Manager(pluggy.PluginManager):
    """Looks past what cannot be a hook: pluggy looks up every name of a module in the way of `getattr_static`."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        if type(plugin) is ModuleType:
            value = vars(plugin).get(name)
            marked = isinstance(value, FunctionType) and f"{GROUP}_impl" in vars(value)
            if not marked and not isinstance(value, (MethodType, classmethod, staticmethod)):
                return None
        return super().parse_hookimpl_opts(plugin, name)


def _make_manager() -> pluggy.PluginManager:
    manager = _Manager(GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


def _check_section(section: Section, name: str, host: Host) -> None:
    kind = host.specs.kinds.get(section.kind)
    if section.kind and (kind is None or kind.owner != name):
        raise PluginError(f"declares a section of the kind {section.kind!r}; expected a kind that it adds")
    if not attrs.has(section.options):
        raise PluginError(f"declares a section of {section.options!r}; expected an attrs class")


def _register(kind: str, name: str, caller: pluggy.HookCaller, host: Host) -> tuple[str, ...]:
    """Call a plugin's hook, and return the names that it registered."""
    registry = host.registry(kind)
    for each in caller.get_hookimpls():
        if each.plugin_name == name:
            _call(each, registry, f"has a hook {caller.name!r}")
    entries = registry.of(name)
    for entry in entries:
        if not attrs.has(entry.config) or "name" in attrs.fields_dict(entry.config):
            part = f"registers {registry.kind} {entry.name!r}"
            raise PluginError(f"{part}: expected an attrs class without a field 'name' as config, got {entry.config!r}")
    return tuple(entry.name for entry in entries)


def _call(implementation: pluggy.HookImpl, registry: Registry[object], where: str) -> None:
    try:
        with registry.owned_by(implementation.plugin_name):
            implementation.function(*(registry for _ in implementation.argnames))
    except (Exception, SystemExit) as error:
        raise PluginError(f"{where} that raised {describe(error)}") from error
