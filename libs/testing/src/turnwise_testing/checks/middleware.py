"""The checks of wrappers, for one part of the section `middleware`: it acts through the hooks of that plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from turnwise.plugin.host import load
from turnwise.types import PluginRecipe
from turnwise_testing.checks.wrapper import WRAPPER_CHECKS, WrapperCheck, WrapperProbe

_PLUGIN = "middleware"


def middleware_checks(make_middleware: Callable[[], object]) -> tuple[Mapping[str, WrapperCheck], WrapperProbe]:
    """Return the checks, and the probe of the middleware that a function makes."""
    host = load(PluginRecipe(allow=(_PLUGIN,)))
    return WRAPPER_CHECKS, WrapperProbe.of(host, _PLUGIN, lambda: (make_middleware(),))
