"""Finds the environment that a config names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Final

from turnwise.errors import ConfigError, describe
from turnwise_environments.config import EnvironmentConfig
from turnwise_environments.protocol import Environment

GROUP: Final = "turnwise.environments"
"""The entry points of environments: `name = "package.module:Name"`."""


def find_factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """
    Return a function that makes the environment of an episode, after one call of it.

    Raises:
        ConfigError: no such environment, it cannot be imported, its options do not fit, or it is no environment.
    """
    name = config.environment
    try:
        found = _import_place(name) if ":" in name else _load_registered(name)
    except ImportError as error:
        cure = f"; install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"environment {name!r} cannot be imported: {error}{cure}") from error
    if not callable(found):
        raise ConfigError(f"environment {name!r} is {type(found).__name__}, expected a class or a function")

    def build() -> Environment:
        made: Environment = found(**config.options)
        return made

    try:
        made: object = build()
    except ConfigError as error:
        raise ConfigError(f"environment {name!r}: {error}") from error
    except Exception as error:
        raise ConfigError(f"environment {name!r} cannot be made with its options: {describe(error)}") from error
    missing = [method for method in ("reset", "step", "close") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"environment {name!r}: {type(made).__name__} has no {', '.join(missing)}")
    return build


def _load_registered(name: str) -> object:
    registered = entry_points(group=GROUP)
    chosen = [each for each in registered if each.name == name]
    if len(chosen) > 1:
        owners = ", ".join(sorted(each.dist.name if each.dist else each.value for each in chosen))
        raise ConfigError(f"environment {name!r} is registered by several packages: {owners}; uninstall all but one")
    if not chosen:
        names = sorted(each.name for each in registered)
        close = get_close_matches(name, names, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(
            f"environment {name!r} is not registered{hint}; registered are {', '.join(names)}. Name an environment of"
            " your own as 'package.module:Name'"
        )
    loaded: object = chosen[0].load()
    return loaded


def _import_place(place: str) -> object:
    module_name, _, name = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"environment {place!r}: no module {error.name!r}; install it, or add its folder to PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        close = get_close_matches(name, public, 1)
        raise ConfigError(f"module {module_name} has no {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    found: object = getattr(module, name)
    return found
