"""
Calls the hooks that wrap parts, through pluggy.

A wrapper gets the result of the wrapper before it. A call of `manager.hook` gives all implementations the same
arguments, so each plugin's implementation is called apart, with `subset_hook_caller`, in pluggy's order. An error then
names its plugin, too.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, cast

import pluggy
from attrs import frozen

from turnwise.errors import PluginError, WrapperError, describe
from turnwise.plugin.kinds import Section
from turnwise.protocols.wrapper import RunInfo

T = TypeVar("T")
CONFIG_SECTION: Final = "config_section"
WRAPPED: Final = (
    "agents",
    "engines",
    "group_rewards",
    "interactions",
    "postprocessors",
    "rewards",
    "tool_parsers",
    "tools",
)
"""The registries of the parts that hooks wrap: the hook `wrap_engine` wraps parts of `engines`."""


def noun_of(kind: str) -> str:
    """Return the name of one part of a kind, as in the name of its hook and of the hook's argument."""
    return kind.removesuffix("s")


@frozen(eq=False)
class Wrapping:
    """The implementations of the hooks `wrap_*` and `config_section` in this process."""

    manager: pluggy.PluginManager

    def plugins(self, kind: str) -> tuple[str, ...]:
        """Return the plugins that wrap parts of a kind, the innermost first: the one that pluggy calls last."""
        if kind not in WRAPPED:
            return ()
        caller: pluggy.HookCaller = getattr(self.manager.hook, f"wrap_{noun_of(kind)}")
        return tuple(each.plugin_name for each in caller.get_hookimpls())

    def kinds(self, plugin: str) -> tuple[str, ...]:
        """Return the kinds of parts that a plugin wraps."""
        return tuple(kind for kind in WRAPPED if plugin in self.plugins(kind))

    def section(self, plugin: str) -> Section | None:
        """Return the section that a plugin declares, or an empty one of a plugin that wraps parts."""
        try:
            found = self._call(plugin, CONFIG_SECTION)
        except (Exception, SystemExit) as error:
            raise PluginError(f"has a hook {CONFIG_SECTION!r} that raised {describe(error)}") from error
        if found is None:
            return Section() if self.kinds(plugin) else None
        if not isinstance(found, Section):
            raise PluginError(f"has a hook {CONFIG_SECTION!r} that returned {found!r}; expected a turnwise.Section")
        return found

    def wrap(self, plugin: str, kind: str, part: T, contract: type, run: RunInfo) -> T:
        """
        Return a part inside of a plugin's wrapper: the part itself where the plugin leaves it.

        Raises:
            WrapperError: the hook raised, or its result lacks a method of the contract.
        """
        noun = noun_of(kind)
        hook = f"wrap_{noun}"
        try:
            outer = self._call(plugin, hook, **{noun: part, "run": run})
        except (Exception, SystemExit) as error:
            raise WrapperError(f"{hook!r} of plugin {plugin!r} raised {describe(error)}") from error
        if outer is None:
            return part
        if missing := [name for name in methods_of(contract) if not hasattr(outer, name)]:
            lacks = f"{type(outer).__name__}, which has no {', '.join(missing)}"
            raise WrapperError(
                f"{hook!r} of plugin {plugin!r} returned {lacks}; expected a {contract.__name__} or None"
            )
        return cast("T", outer)

    def _call(self, plugin: str, hook: str, **arguments: object) -> Any:
        others = [each for name, each in self.manager.list_name_plugin() if name != plugin and each is not None]
        return self.manager.subset_hook_caller(hook, remove_plugins=others)(**arguments)


def methods_of(contract: type) -> tuple[str, ...]:
    """Return the public methods and attributes of a protocol, sorted."""
    names = {*getattr(contract, "__annotations__", ()), *vars(contract)}
    return tuple(sorted(name for name in names if not name.startswith("_")))
