"""
The base class of middleware, and the hook that registers it.

A subclass overrides the methods that it needs. Parts for which it has none are not wrapped, so they cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from turnwise import Registry, RunInfo, Wrapper, hookspec
from turnwise_middleware.interception import Interception

T = TypeVar("T")
Method = Literal["tool", "parse", "step", "reward", "postprocess", "engine"]
"""The end of the names of a pair of methods, such as `before_tool` and `after_tool`."""


class Middleware(Interception):
    """
    Acts before and after the calls of parts; every method lets a call pass unchanged unless it is overridden.

    One object serves many episodes at once. Methods that are not async must not block.

    Args:
        config: its options.
        resources: of the run: the model and the seed.
    """

    def acts_on(self, *methods: Method) -> bool:
        """Return whether a method of one of these pairs is overridden."""
        names = [f"{when}_{method}" for method in methods for when in ("before", "after")]
        return any(getattr(type(self), name) is not getattr(Interception, name) for name in names)


@hookspec
def register_middleware(registry: Registry[Middleware]) -> None:
    """Add middleware, which acts in the runs whose section `middleware` names it; see `Middleware`."""


def wrap_in(part: T, run: RunInfo, wrapper: type[Wrapper[T]], *methods: Method) -> T | None:
    """Return a part inside of the run's middleware with one of these methods, the first outside; None without any."""
    outer = part
    middleware: Sequence[Middleware] = run.options(tuple)
    for each in reversed(middleware):
        if each.acts_on(*methods):
            outer = wrapper.around(outer, each, run.resources.chat)
    return None if outer is part else outer
