"""Registers a tool parser for each format, `auto`, which chooses one, and the reasoning parsers."""

from __future__ import annotations

from functools import partial

from turnwise import ReasoningParser, Registry, Resources, ToolParser, hookimpl
from turnwise_tool_formats.config import LimitConfig, ParserConfig
from turnwise_tool_parsers.config import CONFIGS
from turnwise_tool_parsers.harmony import HarmonyReasoning
from turnwise_tool_parsers.think_tags import ThinkTags, ThinkTagsConfig

_NAMES = (
    "deepseek_v3",
    "glm45",
    "gpt_oss",
    "granite",
    "kimi_k2",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "phi4",
    "qwen3_coder",
)


def make_parser(name: str, config: LimitConfig, resources: Resources) -> ToolParser:
    """Build the parser of a format by its name; `ConfigError` when the run has no tokenizer."""
    from turnwise_tool_formats.parser import FormatParser
    from turnwise_tool_parsers.formats import FORMATS

    grammars = {grammar.name: grammar for grammar in FORMATS}
    return FormatParser(grammars[name](), config, resources)


def make_auto(config: LimitConfig, resources: Resources) -> ToolParser:
    """Build the parser that the chat template of the model asks for; `ConfigError` when it cannot be told."""
    from turnwise_tool_parsers.detection import make_auto_parser

    return make_auto_parser(config, resources)


def make_think_tags(config: ThinkTagsConfig, _resources: Resources) -> ReasoningParser:
    """Build the parser of reasoning between tags."""
    return ThinkTags(config)


def make_harmony(_config: object, _resources: Resources) -> ReasoningParser:
    """Build the parser of reasoning in messages of gpt-oss."""
    return HarmonyReasoning()


@hookimpl
def register_tool_parsers(registry: Registry[ToolParser]) -> None:
    """Register each format of this package by its name, and `auto`."""
    registry.add("auto", make_auto, config=LimitConfig)
    for name in _NAMES:
        registry.add(name, partial(make_parser, name), config=CONFIGS.get(name, ParserConfig))


@hookimpl
def register_reasoning_parsers(registry: Registry[ReasoningParser]) -> None:
    """Register `think_tags` and `harmony`."""
    registry.add("think_tags", make_think_tags, config=ThinkTagsConfig)
    registry.add("harmony", make_harmony)
