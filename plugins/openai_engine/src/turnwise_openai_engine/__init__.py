"""Servers that somebody else runs, as one engine. Only the hook stands here."""

from __future__ import annotations

import turnwise
from turnwise_openai_engine.config import OpenAIConfig
from turnwise_openai_engine.engine import OpenAIEngine


@turnwise.hookimpl
def register_engines(registry: turnwise.Registry[turnwise.Engine]) -> None:
    """Add `openai`."""
    registry.add("openai", OpenAIEngine, config=OpenAIConfig)
