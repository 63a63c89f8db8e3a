"""SGLang as an engine of turnwise. This module only registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import turnwise
from turnwise_sglang_engine.config import SglangConfig

if TYPE_CHECKING:
    from turnwise_sglang_engine.engine import SglangEngine

__all__ = ["SglangConfig", "SglangEngine"]


def __getattr__(name: str) -> object:
    if name != "SglangEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnwise_sglang_engine.engine import SglangEngine

    return SglangEngine


def make_engine(config: SglangConfig, resources: turnwise.Resources) -> turnwise.Engine:
    """Build the engine, which a process imports only if it has one."""
    from turnwise_sglang_engine.engine import SglangEngine

    return SglangEngine(config, resources)


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `sglang`."""
    registry.add("sglang", make_engine, config=SglangConfig)


def make_diagnostic(_config: turnwise.NoConfig, _resources: turnwise.Resources) -> turnwise.Diagnostic:
    """Return the checks of this engine: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_sglang_engine import diagnosis

    return diagnosis


@turnwise.hookimpl
def register_diagnostics(registry: turnwise.Registry[turnwise.Diagnostic]) -> None:
    """Add the checks of `sglang`."""
    registry.add("sglang", make_diagnostic)
