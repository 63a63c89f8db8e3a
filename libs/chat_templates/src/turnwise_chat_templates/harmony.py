"""
The chat `harmony`: the format of gpt-oss without its template.

Prompts have the bytes of gpt-oss's chat template wherever the template shows all messages. In addition, a turn may have
several calls, and each result names its own tool. What was sampled stays in a record as it was: the reasoning of
earlier turns too, which the template drops.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from turnwise.errors import TemplateError
from turnwise.options import SpecialTokenPolicy
from turnwise.types import Message, ToolSchema
from turnwise_chat_templates.config import HarmonyConfig
from turnwise_chat_templates.family import FamilyChat, naming_message
from turnwise_chat_templates.probe import Plain
from turnwise_chat_templates.render import plain_message
from turnwise_chat_templates.typescript import write_namespace

_ASSISTANT: Final = "<|start|>assistant"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_LEADING_ROLES: Final = ("developer", "system")
_HEADERS: Final = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
"""Texts that show that a content is a whole sampled turn, which has to be split before."""


class HarmonyChat(FamilyChat):
    """
    The chat of gpt-oss.

    - A leading message of the role `system` or `developer` is the developer's; the system message is the chat's own.
    - The reasoning of earlier turns is shown in turns with calls only, and up to the next turn without calls.
    - A content beside calls is in the channel `analysis`, or in `commentary` beside a reasoning.
    - Results of tools follow `<|call|>`, and a user's message follows any end of a turn. Where it is missing, a
      delta begins with `<|call|>` or `<|end|>`.

    Args:
        tokenizer: any tokenizer of transformers with the special tokens of gpt-oss.
        special_tokens: treatment of special tokens that messages spell; schemas of tools are not messages.
        config: the texts of the system message.
    """

    turn_end = _RETURN
    more_turn_ends: ClassVar[tuple[str, ...]] = (_CALL,)
    turn_start = _ASSISTANT

    def __init__(
        self, tokenizer: Any, *, special_tokens: SpecialTokenPolicy = "text", config: HarmonyConfig | None = None
    ) -> None:
        super().__init__(tokenizer, special_tokens=special_tokens)
        self._config = config or HarmonyConfig()
        self._end_id, self._call_id = self.find_special(_END), self.find_special(_CALL)

    def read(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        last_answer = max((index for index, each in enumerate(messages) if _is_answer(each)), default=-1)
        names: dict[str, str] = {}
        shown = []
        for index, message in enumerate(messages):
            with naming_message(messages, index):
                plain = _read_message(message, names)
            if index < last_answer:  # the template drops the reasoning before an answer
                plain.pop("thinking", None)
            shown.append(plain)
        return shown

    def write_head(self, messages: Sequence[Mapping[str, object]], tools: Sequence[ToolSchema]) -> tuple[str, int]:
        is_led = messages[0]["role"] in _LEADING_ROLES
        instructions = messages[0]["content"] if is_led else ""
        text = f"# Instructions\n\n{instructions}\n\n" if instructions else ""
        if tools:
            text += f"# Tools\n\n{write_namespace('functions', tools)}"
        developer = f"<|start|>developer<|message|>{text}{_END}" if text else ""
        return f"{self._write_system(has_tools=bool(tools))}{developer}", int(is_led)

    def write(self, message: Mapping[str, object]) -> str:
        role, content = message["role"], message["content"]
        if role == "user":
            return f"<|start|>user<|message|>{content}{_END}"
        if role == "tool":
            header = f"<|start|>functions.{message['name']} to=assistant<|channel|>commentary<|message|>"
            return f"{header}{_to_json(content)}{_END}"
        if role == "assistant":
            return _write_turn(message)
        if role in _LEADING_ROLES:
            raise TemplateError("gpt-oss has such a message at the beginning of a prompt only")
        raise TemplateError("gpt-oss has no such role; it has system, developer, user, assistant and tool")

    def close_turn(self, last_token_id: int, messages: Sequence[Mapping[str, object]]) -> str:
        if messages[0]["role"] == "tool":
            return "" if last_token_id == self._call_id else _CALL
        return "" if last_token_id in (self._end_id, *self.stop_token_ids) else _END

    def _write_system(self, *, has_tools: bool) -> str:
        config = self._config
        lines = [
            f"<|start|>system<|message|>{config.model_identity}",
            f"Knowledge cutoff: {config.knowledge_cutoff}",
            f"Current date: {config.date}",
            "",
            f"Reasoning: {config.reasoning_effort}",
            "",
            "# Valid channels: analysis, commentary, final. Channel must be included for every message.",
        ]
        if has_tools:
            lines.append("Calls to these tools must go to the commentary channel: 'functions'.")
        return "\n".join(lines) + _END


def _is_answer(message: Message) -> bool:
    return message.get("role") == "assistant" and not message.get("tool_calls")


def _read_message(message: Message, names: dict[str, str]) -> Plain:
    """
    Return a message with the keys that `HarmonyChat.write` reads, and its calls as names and texts.

    Args:
        message: in the OpenAI form.
        names: of the tools by the ids of calls so far; gets those of the message.
    """
    if not isinstance(message.get("role"), str):
        raise TemplateError("it has no role")
    calls = _read_calls(message)
    plain = plain_message({**message, "tool_calls": None}, reasoning_key="thinking")
    shown: Plain = {"role": plain["role"], "content": plain["content"], "calls": calls}
    if plain["role"] == "assistant":
        shown["thinking"] = plain.get("thinking", "")
        _check_turn(shown)
        names.update({call["id"]: call["name"] for call in calls if call["id"]})
    if plain["role"] == "tool":
        shown["name"] = plain.get("name") or names.get(_read_id(plain, "tool_call_id"))
        if not shown["name"] or not isinstance(shown["name"], str):
            raise TemplateError("a result needs the 'name' of its tool, or the 'tool_call_id' of an earlier call")
    return shown


def _read_id(value: Mapping[str, object], key: str) -> str:
    """Return an id; "" if there is none, or no text."""
    found = value.get(key)
    return found if isinstance(found, str) else ""


def _read_calls(message: Message) -> list[dict[str, str]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise TemplateError(f"tool_calls must be a list, not {type(calls).__name__}")
    return [_read_call(call, number) for number, call in enumerate(calls)]


def _read_call(call: object, number: int) -> dict[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"tool_calls[{number}] has no function with a name")
    (plain,) = plain_message({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    arguments = plain["function"]["arguments"]
    if not isinstance(arguments, Mapping):
        raise TemplateError(f"tool_calls[{number}]: the arguments are no JSON object")
    kind = str(function.get("content_type", "json"))
    return {"id": _read_id(call, "id"), "name": function["name"], "kind": kind, "arguments": _to_json(arguments)}


def _check_turn(message: Plain) -> None:
    for key in ("content", "thinking"):
        if not isinstance(message[key], str):
            raise TemplateError(f"{key!r} must be text, not {type(message[key]).__name__}")
        if any(header in message[key] for header in _HEADERS):
            raise TemplateError(
                f"{key!r} has headers of messages; put the analysis in 'thinking', the rest in 'content'"
            )


def _write_turn(message: Mapping[str, Any]) -> str:
    """Return a turn of the model; one without calls shows no reasoning, as in the template."""
    content, calls = message["content"], message["calls"]
    if not calls:
        return f"{_ASSISTANT}<|channel|>final<|message|>{content}{_END}"
    thinking = message.get("thinking", "")
    texts = {"analysis": thinking, "commentary": content} if thinking else {"analysis": content}
    parts = [f"{_ASSISTANT}<|channel|>{channel}<|message|>{text}{_END}" for channel, text in texts.items() if text]
    for call in calls:
        header = f"{_ASSISTANT} to=functions.{call['name']}<|channel|>commentary {call['kind']}<|message|>"
        parts.append(f"{header}{call['arguments']}{_CALL}")
    return "".join(parts)


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
