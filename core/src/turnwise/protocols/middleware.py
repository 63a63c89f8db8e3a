"""The contract of middleware."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from turnwise.protocols.chat import Chat


@runtime_checkable
class Middleware(Protocol):
    """
    Wraps parts of a run when they are built, so a run without it pays nothing.

    `turnwise_middleware.Middleware` is the base class, with a method before and after each call of a part.
    """

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds that it wraps: `agents`, `engines`, `postprocessors`, `rewards`, `tool_parsers` or `tools`."""

    def wrap(self, kind: str, part: Any, chat: Chat | None) -> Any:
        """
        Return an object with the methods of a part, to be called in its place.

        Of an engine, only the lifecycle is called: requests go to the engine itself, so no middleware sees or changes
        a sampled token.
        """
