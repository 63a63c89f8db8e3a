"""External inference servers as one engine of turnwise. This module only registers it."""

from __future__ import annotations

import turnwise
from turnwise_openai_engine.config import OpenAIConfig


def make_openai(config: OpenAIConfig, resources: turnwise.Resources) -> turnwise.Engine:
    """Build the engine; other runs do not import its HTTP client."""
    from turnwise_openai_engine.engine import OpenAIEngine

    return OpenAIEngine(config, resources)


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `openai`."""
    registry.add("openai", make_openai, config=OpenAIConfig, reads_weights=False)


def make_diagnostic(_config: turnwise.NoConfig, _resources: turnwise.Resources) -> turnwise.Diagnostic:
    """Return the checks of this engine: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_openai_engine import diagnosis

    return diagnosis


@turnwise.hookimpl
def register_diagnostics(registry: turnwise.Registry[turnwise.Diagnostic]) -> None:
    """Add the checks of `openai`."""
    registry.add("openai", make_diagnostic)
