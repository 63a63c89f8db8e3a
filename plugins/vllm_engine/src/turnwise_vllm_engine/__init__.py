"""vLLM as an engine, in the process that asks and its children. Only the hook stands here."""

from __future__ import annotations

import turnwise
from turnwise_vllm_engine.config import VllmConfig
from turnwise_vllm_engine.engine import VllmEngine


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `vllm`."""
    registry.add("vllm", VllmEngine, config=VllmConfig)
