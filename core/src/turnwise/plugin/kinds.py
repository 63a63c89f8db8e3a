"""Kinds of parts; the core adds its own as a plugin does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from attrs import define, field, frozen

from turnwise.errors import DuplicateNameError, PluginError, describe
from turnwise.plugin.registry import NoConfig, Registry

ADD_HOOKSPECS: Final = "add_hookspecs"
CORE: Final = "builtins"
"""The entry-point name of the core's own plugin."""
_PREFIX: Final = "register_"


@frozen(kw_only=True)
class Section:
    """
    A plugin's own section of a config: the top-level key with the entry-point name of the plugin.

    Its hooks get it as `RunInfo.section`.

    Attributes:
        options: attrs class of the section; the hooks get an object of it.
        kind: of parts that the plugin adds with `add_hookspecs`, in place of `options`: the section is a list of
            choices, as `tools` is, and the hooks get a tuple of the built parts.
        in_replicas: of a plugin that wraps engines: called in the driver with what the hooks get, it returns whether
            this section wraps engines; a replica loads the plugin only then. None is always.
    """

    options: type = NoConfig
    kind: str = ""
    in_replicas: Callable[[object], bool] | None = None


@frozen(kw_only=True)
class Kind:
    """
    A kind of part.

    Attributes:
        spec: the hook's specification.
        registry: of the parts.
        checks: ``module:function`` of the conformance checks; empty for none.
        owner: entry-point name of the plugin that added it; `builtins` for the core.
    """

    spec: Callable[..., object]
    registry: Registry[Any]
    checks: str
    owner: str


@define
class HookSpecs:
    """
    Collects the kinds of parts, each with its hook; the hook `add_hookspecs` receives it.

    Attributes:
        kinds: by their name, the end of the hook's name.
    """

    kinds: dict[str, Kind] = field(factory=dict)
    _owner: str = field(default=CORE, init=False)

    def add(
        self, spec: Callable[[Registry[Any]], None], *, part: str, contract: type | None = None, checks: str = ""
    ) -> None:
        """
        Add a hook by which plugins register parts of a new kind.

        Args:
            spec: a function ``register_KIND(registry)`` that is marked with `turnwise.hookspec`.
            part: the kind in the singular, for error texts, such as `loss`.
            contract: a protocol that is marked as runtime-checkable, or a base class; None checks nothing.
            checks: ``module:function`` that ``turnwise check`` imports. The function gets a function that builds a
                part, and returns checks by name, as in `turnwise_testing`, and the probe that each is called with.

        Raises:
            PluginError: the function is no specification of such a name.
            DuplicateNameError: another plugin adds the hook.
        """
        name = getattr(spec, "__name__", "")
        if not name.startswith(_PREFIX) or not hasattr(spec, "turnwise_spec"):
            raise PluginError(f"{name!r} is no function register_KIND that is marked with @turnwise.hookspec")
        if list(inspect.signature(spec).parameters) != ["registry"]:
            raise PluginError(f"{name!r} must have one argument, registry")
        kind = name.removeprefix(_PREFIX)
        if kind in self.kinds:
            owner = self.kinds[kind].owner
            if owner == CORE:
                raise PluginError(f"adds the hook {name!r}, which turnwise has")
            raise DuplicateNameError(f"the hook {name!r} is added by {owner!r} too; uninstall one")
        registry: Registry[Any] = Registry(part, contract)
        self.kinds[kind] = Kind(spec=spec, registry=registry, checks=checks, owner=self._owner)

    def collect(self, module: object, owner: str) -> None:
        """Call a plugin's hook `add_hookspecs`, if it has it; `PluginError` if that raises."""
        function = getattr(module, ADD_HOOKSPECS, None)
        if function is None or not hasattr(function, "turnwise_impl"):
            return
        self._owner = owner
        try:
            function(self)
        except (Exception, SystemExit) as error:
            raise PluginError(f"has a hook {ADD_HOOKSPECS!r} that raised {describe(error)}") from error

    def as_module(self) -> ModuleType:
        """Return the specifications that plugins have added, in the form that pluggy reads."""
        module = ModuleType("added_hookspecs")
        added = {f"{_PREFIX}{name}": kind.spec for name, kind in self.kinds.items() if kind.owner != CORE}
        vars(module).update(added)
        return module

    def remove(self, owner: str) -> None:
        """Remove the kinds that a plugin has added."""
        self.kinds = {name: kind for name, kind in self.kinds.items() if kind.owner != owner}
