"""Registers the hooks of a plugin with pluggy, and refuses functions that pluggy would never call."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pluggy

from turnwise.errors import PluginError, describe
from turnwise.plugin.kinds import ADD_HOOKSPECS
from turnwise.plugin.registry import did_you_mean
from turnwise.plugin.wrapping import CONFIG_SECTION, WRAPPED, noun_of


def check_hooks(
    module: object, name: str, manager: pluggy.PluginManager, kinds: Iterable[str]
) -> dict[str, pluggy.HookCaller]:
    """
    Register a plugin with pluggy, and return its hooks by their names.

    Args:
        module: of the plugin.
        name: of its entry point.
        manager: with the specifications of all hooks.
        kinds: of parts that plugins register.

    Raises:
        PluginError: a hook is unknown, is not marked, has other arguments, or is no plain function.
    """
    try:
        manager.register(module, name=name)
    except (ValueError, pluggy.PluginValidationError) as error:
        raise PluginError(f"cannot be registered: {describe(error)}; write `def HOOK(registry)`") from error
    registering = [f"register_{kind}" for kind in kinds]
    hooks = (*registering, ADD_HOOKSPECS, CONFIG_SECTION, *(f"wrap_{noun_of(kind)}" for kind in WRAPPED))
    callers = manager.get_hookcallers(module) or ()
    for caller in callers:
        own = [each for each in caller.get_hookimpls() if each.plugin_name == name]
        if not caller.has_spec() and not all(each.optionalhook for each in own):
            raise PluginError(f"has an unknown hook {caller.name!r}{did_you_mean(caller.name, hooks)}")
        for each in own:
            _check_function(each, caller)
    for hook in hooks:
        function = getattr(module, hook, None)
        # The specifications have these names too, and a plugin may import them.
        marked = hasattr(function, "turnwise_impl") or hasattr(function, "turnwise_spec")
        if function is not None and not marked and inspect.isroutine(function):
            raise PluginError(f"has a function {hook!r} that is not marked with @turnwise.hookimpl")
    return {caller.name: caller for caller in callers}


def _check_function(implementation: pluggy.HookImpl, caller: pluggy.HookCaller) -> None:
    function, hook = implementation.function, caller.name
    # pluggy would call these without running them, and without an error.
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise PluginError(f"has a hook {hook!r} that is async or a wrapper; expected a plain function")
    arguments = caller.spec.argnames if caller.spec is not None else ()
    if arguments and not implementation.argnames:
        usage = f"def {hook}({', '.join(arguments)})"
        raise PluginError(f"has a hook {hook!r} without an argument; write `{usage}`")
