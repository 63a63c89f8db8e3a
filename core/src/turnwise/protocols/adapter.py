"""The contract of adapters."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from turnwise.types import JsonObject


@runtime_checkable
class Adapter(Protocol):
    """Makes parts from Python objects that do not fulfil a protocol themselves, such as functions."""

    def adapt(self, kind: str, value: Any, options: JsonObject) -> object | None:
        """
        Return a part made from an object, or None for an object that another adapter may know.

        Args:
            kind: the registry that has parts of this kind, such as `tools`.
            value: the object, which a config names or a program passes.
            options: the other keys of its section in the config.

        Raises:
            ConfigError: one line that says why the object or its options do not fit.
        """
