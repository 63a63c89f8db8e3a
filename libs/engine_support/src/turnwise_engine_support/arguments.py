"""Checks of `engine_args`: the keyword arguments that a user passes through to the wrapped engine."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from attrs import Attribute


def engine_args_validator(
    owned: Mapping[str, str], fixed: Collection[str]
) -> Callable[[object, Attribute[Any], Mapping[str, Any]], None]:
    """
    Return an attrs validator for the option `engine_args`.

    Args:
        owned: arguments that have an option of the plugin, with the name of that option.
        fixed: arguments that only the plugin may set.
    """

    def check(_config: object, _attribute: Attribute[Any], engine_args: Mapping[str, object]) -> None:
        for name in engine_args:
            if name in owned:
                raise ValueError(f"'engine_args' must not contain {name!r}: set {owned[name]}")
            if name in fixed:
                raise ValueError(f"'engine_args' must not contain {name!r}: the engine sets it")

    return check


def unknown_argument(names: Iterable[str], known: Collection[str]) -> str:
    """Return a text about the first unknown name, with the closest known one; empty if all are known."""
    for name in names:
        if name not in known:
            return f"no argument {name!r} (engine_args){did_you_mean(name, known)}"
    return ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """
    Return `; did you mean 'x'?` for the closest known name, or an empty text if none is close.

    Unlike its namesake in `turnwise.plugin.registry` it never lists all names: models have thousands of weights.
    """
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
