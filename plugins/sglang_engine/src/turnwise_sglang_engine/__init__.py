"""SGLang as an engine of turnwise. This module only registers it."""

from __future__ import annotations

import turnwise
from turnwise_sglang_engine.config import SglangConfig
from turnwise_sglang_engine.engine import SglangEngine


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `sglang`."""
    registry.add("sglang", SglangEngine, config=SglangConfig)


def make_diagnostic(_config: turnwise.NoConfig, _resources: turnwise.Resources) -> turnwise.Diagnostic:
    """Return the checks of this engine: a module with a function `diagnose` is a `Diagnostic`."""
    from turnwise_sglang_engine import diagnosis

    return diagnosis


@turnwise.hookimpl
def register_diagnostics(registry: turnwise.Registry[turnwise.Diagnostic]) -> None:
    """Add the checks of `sglang`."""
    registry.add("sglang", make_diagnostic)
