"""
The base class of middleware.

A subclass overrides the methods that it needs. Parts for which it has none are not wrapped, so they cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from turnwise import Chat
from turnwise_middleware.interception import Interception

_KIND_OF_METHOD: Final[Mapping[str, str]] = {
    "tool": "tools",
    "parse": "tool_parsers",
    "step": "agents",
    "reward": "rewards",
    "postprocess": "postprocessors",
    "engine": "engines",
}
"""The kind of the parts that a pair of methods is about, such as `before_tool` and `after_tool`."""


class Middleware(Interception):
    """
    Acts before and after the calls of parts; every method lets a call pass unchanged unless it is overridden.

    One object serves many episodes at once. Methods that are not async must not block.

    Args:
        config: its options.
        resources: of the run: the model and the seed.
    """

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of parts for which a method is overridden."""
        kinds = {kind for method, kind in _KIND_OF_METHOD.items() if _overrides(type(self), method)}
        # A parser knows no episode: the wrapper of the agent says which one runs.
        return frozenset(kinds | {"agents"} if "tool_parsers" in kinds else kinds)

    def wrap(self, kind: str, part: Any, chat: Chat | None) -> Any:
        """Return a part with this middleware around it."""
        from turnwise_middleware.wrappers import WRAPPERS

        return WRAPPERS[kind](part, self, chat)


def _overrides(kind: type[Middleware], method: str) -> bool:
    names = (f"before_{method}", f"after_{method}")
    return any(getattr(kind, name) is not getattr(Interception, name) for name in names)
