"""The embedded engine: transformers' continuous batching, in the process that asks. Only the hook stands here."""

from __future__ import annotations

import turnwise
from turnwise_transformers_engine.config import TransformersConfig
from turnwise_transformers_engine.engine import TransformersEngine


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `transformers`."""
    registry.add("transformers", TransformersEngine, config=TransformersConfig)
