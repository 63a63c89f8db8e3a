"""SGLang as an engine, in a process of its own. Only the hook stands here."""

from __future__ import annotations

import turnwise
from turnwise_sglang_engine.config import SglangConfig
from turnwise_sglang_engine.engine import SglangEngine


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `sglang`."""
    registry.add("sglang", SglangEngine, config=SglangConfig)
