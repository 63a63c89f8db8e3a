"""vLLM as an engine of turnwise. This module only registers it."""

from __future__ import annotations

import turnwise
from turnwise_vllm_engine.config import VllmConfig
from turnwise_vllm_engine.engine import VllmEngine


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `vllm`."""
    registry.add("vllm", VllmEngine, config=VllmConfig)


def make_diagnostic(_config: turnwise.NoConfig, _resources: turnwise.Resources) -> turnwise.Diagnostic:
    """Return the checks of this engine: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_vllm_engine import diagnosis

    return diagnosis


@turnwise.hookimpl
def register_diagnostics(registry: turnwise.Registry[turnwise.Diagnostic]) -> None:
    """Add the checks of `vllm`."""
    registry.add("vllm", make_diagnostic)
