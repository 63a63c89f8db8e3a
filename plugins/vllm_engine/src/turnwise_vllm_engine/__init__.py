"""vLLM as an engine of turnwise. This module only registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import turnwise
from turnwise_vllm_engine.config import VllmConfig

if TYPE_CHECKING:
    from turnwise_vllm_engine.engine import VllmEngine

__all__ = ["VllmConfig", "VllmEngine"]


def __getattr__(name: str) -> object:
    if name != "VllmEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnwise_vllm_engine.engine import VllmEngine

    return VllmEngine


def make_engine(config: VllmConfig, resources: turnwise.Resources) -> turnwise.Engine:
    """Build the engine, which a process imports only if it has one."""
    from turnwise_vllm_engine.engine import VllmEngine

    return VllmEngine(config, resources)


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `vllm`."""
    registry.add("vllm", make_engine, config=VllmConfig)


def make_diagnostic(_config: turnwise.NoConfig, _resources: turnwise.Resources) -> turnwise.Diagnostic:
    """Return the checks of this engine: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_vllm_engine import diagnosis

    return diagnosis


@turnwise.hookimpl
def register_diagnostics(registry: turnwise.Registry[turnwise.Diagnostic]) -> None:
    """Add the checks of `vllm`."""
    registry.add("vllm", make_diagnostic)
