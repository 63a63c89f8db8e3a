"""Finds the environment that a config names."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Final

from turnwise.errors import ConfigError, describe
from turnwise_environments.config import EnvironmentConfig
from turnwise_environments.protocol import Environment

GROUP: Final = "turnwise.environments"
"""The entry points of environments: `name = "package.module:Name"`."""


def find_factory(config: EnvironmentConfig, find_code: Callable[[str], object]) -> Callable[[], Environment]:
    """
    Return a function that makes the environment of an episode, after one call of it.

    Args:
        config: names the environment and its options.
        find_code: of the run's `Resources`.

    Raises:
        ConfigError: no such environment, it cannot be imported, its options do not fit, or it is no environment.
    """
    name = config.environment
    try:
        found = find_code(name) if ":" in name else _load_registered(name)
    except ConfigError as error:
        raise ConfigError(f"environment {name!r}: {str(error).removeprefix(f'{name}: ')}") from error
    except ImportError as error:
        hint = f"; install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"environment {name!r} cannot be imported: {error}{hint}") from error
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
            " your own as 'package.module:Name' or './file.py:Name'"
        )
    loaded: object = chosen[0].load()
    return loaded
