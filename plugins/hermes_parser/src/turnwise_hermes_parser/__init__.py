"""Registers the tool parser `hermes`, of Hermes, Qwen2.5 and Qwen3."""

from __future__ import annotations

from turnwise import Registry, Resources, ToolParser, hookimpl
from turnwise_hermes_parser.config import HermesConfig

__all__ = ["HermesConfig", "make_hermes", "register_tool_parsers"]


def make_hermes(config: HermesConfig, resources: Resources) -> ToolParser:
    """Build the parser with its tags; `ConfigError` when the run has no tokenizer."""
    from turnwise_tool_formats.hermes import Hermes
    from turnwise_tool_formats.parser import FormatParser

    return FormatParser(Hermes(config.open_tag, config.close_tag), config, resources)


@hookimpl
def register_tool_parsers(registry: Registry[ToolParser]) -> None:
    """Register `hermes`."""
    registry.add("hermes", make_hermes, config=HermesConfig)
