"""The embedded engine: transformers' continuous batching in this process. This module only registers it."""

from __future__ import annotations

import turnwise
from turnwise_transformers_engine.config import TransformersConfig
from turnwise_transformers_engine.engine import TransformersEngine


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `transformers`."""
    registry.add("transformers", TransformersEngine, config=TransformersConfig)


def make_diagnostic(_config: turnwise.NoConfig, _resources: turnwise.Resources) -> turnwise.Diagnostic:
    """Return the checks of this engine: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_transformers_engine import diagnosis

    return diagnosis


@turnwise.hookimpl
def register_diagnostics(registry: turnwise.Registry[turnwise.Diagnostic]) -> None:
    """Add the checks of `transformers`."""
    registry.add("transformers", make_diagnostic)
