"""The embedded engine: transformers' continuous batching in this process. This module only registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import turnwise
from turnwise_transformers_engine.config import TransformersConfig

if TYPE_CHECKING:
    from turnwise_transformers_engine.engine import TransformersEngine

__all__ = ["TransformersConfig", "TransformersEngine"]


def __getattr__(name: str) -> object:
    if name != "TransformersEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnwise_transformers_engine.engine import TransformersEngine

    return TransformersEngine


def make_engine(config: TransformersConfig, resources: turnwise.Resources) -> turnwise.Engine:
    """Build the engine, which a process imports only if it has one."""
    from turnwise_transformers_engine.engine import TransformersEngine

    return TransformersEngine(config, resources)


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `transformers`."""
    registry.add("transformers", make_engine, config=TransformersConfig)


def make_diagnostic(_config: turnwise.NoConfig, _resources: turnwise.Resources) -> turnwise.Diagnostic:
    """Return the checks of this engine: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_transformers_engine import diagnosis

    return diagnosis


@turnwise.hookimpl
def register_diagnostics(registry: turnwise.Registry[turnwise.Diagnostic]) -> None:
    """Add the checks of `transformers`."""
    registry.add("transformers", make_diagnostic)
