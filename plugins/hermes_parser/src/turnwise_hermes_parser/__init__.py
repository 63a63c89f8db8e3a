"""Registers the tool parser `hermes`, for JSON between ``<tool_call>`` tags as Hermes and Qwen models write it."""

from __future__ import annotations

from turnwise import Registry, Resources, ToolParser, hookimpl
from turnwise_hermes_parser.config import HermesConfig


def make_hermes(config: HermesConfig, resources: Resources) -> ToolParser:
    """Build the parser; `ConfigError` when the run has no tokenizer."""
    from turnwise_hermes_parser.parser import HermesParser

    return HermesParser(config, resources.chat)


@hookimpl
def register_tool_parsers(registry: Registry[ToolParser]) -> None:
    """Register `hermes`."""
    registry.add("hermes", make_hermes, config=HermesConfig)
