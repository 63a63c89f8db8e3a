"""
Finds the format of tool calls that a model's chat template writes.

The proof is a round trip: the template renders a conversation with one call, and a format whose parser reads this call
back is a candidate. Some templates show no calls; their instructions or special tokens then name the format.
"""

from __future__ import annotations

import os
from typing import Final

import structlog
from attrs import frozen

from turnwise import Chat, Message, Resources
from turnwise.errors import ConfigError
from turnwise_tool_formats.config import LimitConfig, ParserConfig
from turnwise_tool_formats.parser import FormatParser
from turnwise_tool_formats.prompts import QUESTION, opens_reasoning, render
from turnwise_tool_formats.turn import Grammar
from turnwise_tool_parsers.config import CONFIGS
from turnwise_tool_parsers.formats import FORMATS

_MARKS: Final[dict[str, tuple[str, ...]]] = {
    "granite": ("<|start_of_role|>", "<function_call>"),
    "phi4": ("<|/tool_call|>", "functools[", "<|tool|>"),
    "llama4_pythonic": ("[func_name1(",),
}
"""Texts in the prompts of a family. They tell formats apart that read each other's calls."""
_ARGUMENTS: Final = {"word": "zebra"}
_CALL_IDS: Final = ("call00000", "functions.probe_tool:0")
"""Mistral's templates take ids of nine letters and digits only, and Kimi's show the id in the place of the name."""


@frozen
class Detection:
    """
    The format of a chat template.

    Attributes:
        grammar: the format.
        reason: why it is this one.
        starts_in_reasoning: a prompt opens reasoning.
    """

    grammar: type[Grammar]
    reason: str
    starts_in_reasoning: bool


def detect_format(chat: Chat) -> Detection:
    """
    Return the format of the calls that a chat template writes.

    Raises:
        ConfigError: the template shows no format, or several; the text lists the candidates.
    """
    prompt = render(chat, [QUESTION])
    rendered = [text for call_id in _CALL_IDS for text in _rendered_calls(chat, prompt, call_id)]
    shown = "".join([prompt, *rendered])
    found = [each for each in FORMATS if any(_reads(each, chat, text) for text in rendered)]
    reason = "it reads a call that the chat template wrote"
    if len(found) > 1:
        marked = [each for each in found if _mark_of(each, shown)]
        found = marked or [each for each in found if each.name not in _MARKS] or found
    elif not found:
        found = [each for each in FORMATS if _mark_of(each, shown)]
        marks = ", ".join(repr(_mark_of(each, shown)) for each in found)
        reason = f"the chat template shows no calls, and its prompt contains {marks}"
    if len(found) != 1:
        names = [each.name for each in found or FORMATS]
        fits = "fits several formats" if found else "shows no known format"
        raise ConfigError(
            f"parser: auto cannot tell the format of tool calls, because the chat template {fits}; "
            f"set one of {', '.join(names)}"
        )
    config = _config_class(found[0])()
    thinks = isinstance(config, ParserConfig) and opens_reasoning(
        chat, config.reasoning_open_tag, config.reasoning_close_tag
    )
    return Detection(found[0], reason, thinks)


def make_auto_parser(config: LimitConfig, resources: Resources) -> FormatParser:
    """Build the parser of the chat template, and log its name and the reason; `ConfigError` when it is unclear."""
    if resources.chat is None:
        raise ConfigError("tool parser 'auto' reads a chat template: the run needs a model directory with a tokenizer")
    found = detect_format(resources.chat)
    structlog.get_logger().info(
        "tool parser chosen",
        parser=found.grammar.name,
        reason=found.reason,
        starts_in_reasoning=found.starts_in_reasoning,
    )
    return FormatParser(found.grammar(), _config_class(found.grammar)(max_depth=config.max_depth), resources)


def _config_class(grammar: type[Grammar]) -> type[LimitConfig]:
    return CONFIGS.get(grammar.name, ParserConfig)


def _rendered_calls(chat: Chat, prompt: str, call_id: str) -> list[str]:
    """Return the turn with a call, as far as its start can be told, and the whole conversation; nothing for neither."""
    function: dict[str, object] = {"name": "probe_tool", "arguments": _ARGUMENTS}
    call = {"id": call_id, "type": "function", "function": function}
    turn: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    result: Message = {"role": "tool", "tool_call_id": call_id, "name": "probe_tool", "content": "zebra"}
    whole = render(chat, [QUESTION, turn, result])
    shared = os.path.commonprefix([prompt, whole])  # noqa: RUF071 - texts and not paths: compare characters
    return [whole[len(shared) :], whole] if whole else []


def _reads(grammar: type[Grammar], chat: Chat, text: str) -> bool:
    parser = FormatParser(grammar(), LimitConfig(), Resources(chat=chat))
    calls = parser.parse_text(text)[1]
    return any(not call.error and (call.name, call.arguments) == ("probe_tool", _ARGUMENTS) for call in calls)


def _mark_of(grammar: type[Grammar], shown: str) -> str:
    return next((mark for mark in _MARKS.get(grammar.name, ()) if mark in shown), "")
