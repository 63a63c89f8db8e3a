"""The dialect of OpenAI's Responses, without state: every request has the whole conversation."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from attrs import define, field

from turnwise import Message
from turnwise.types import ToolSchema
from turnwise_gateway.calls import ModelCall, ToolChoice
from turnwise_gateway.dialects.exchange import Received
from turnwise_gateway.dialects.fields import (
    Fields,
    describe_tool,
    read_choice,
    read_parts,
    read_wishes,
    refuse,
    refuse_unsupported,
)
from turnwise_gateway.dialects.responses_events import ENCRYPTED_PREFIX, ResponsesExchange

_TEXT_PARTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_CHOICES: Final[dict[str, ToolChoice]] = {"auto": "auto", "none": "none", "required": "required"}
_ROLES: Final = {"system": "system", "developer": "system", "user": "user"}
_STATE: Final = ("previous_response_id", "conversation", "prompt")


def read_responses(received: Received) -> ResponsesExchange:
    """Return the call of a request; `CallRefusedError` names the first field that is wrong or not supported."""
    request = Fields(received.body)
    request.refuse_sampling_fields()
    ignored: set[str] = set()
    _refuse_state(request, ignored)
    namespaces: dict[str, tuple[str, str]] = {}
    include = request.texts("include")
    call = ModelCall(
        dialect="responses",
        messages=_read_conversation(request, ignored),
        tools=tuple(_read_tools(request, "tools", "", namespaces, ignored)),
        tool_choice=read_choice(request, _CHOICES),
        max_tokens=request.integer("max_output_tokens", 1),
        wishes=read_wishes(request),
        logprobs="message.output_text.logprobs" in include,
        stream=request.flag("stream"),
        model=request.text("model") or "",
    )
    return ResponsesExchange(
        received.complete(call, {*ignored, *request.unread()}),
        namespaces=namespaces,
        encrypts="reasoning.encrypted_content" in include,
    )


def _refuse_state(request: Fields, ignored: set[str]) -> None:
    for key in _STATE:
        if request.value(key) is not None:
            raise refuse_unsupported(key, "send the whole conversation in 'input'")
    if request.flag("background"):
        raise refuse_unsupported("background", "replies are not stored")
    if (text := request.object("text")) is not None:
        shape = text.object("format")
        if shape is not None and shape.text("type") != "text":
            raise refuse_unsupported("text.format", "replies are free text")
        ignored.update(text.unread())


def _read_conversation(request: Fields, ignored: set[str]) -> tuple[Message, ...]:
    conversation = _Conversation(ignored)
    if instructions := request.text("instructions"):
        conversation.messages.append({"role": "system", "content": instructions})
    if isinstance(request.value("input"), str):
        conversation.messages.append({"role": "user", "content": request.text("input")})
    else:
        for item in request.objects("input"):
            conversation.add(item)
    if not request.values.get("input"):
        raise refuse("input", "must be a string or a list, and not be empty")
    return tuple(conversation.messages)


@define
class _Conversation:
    """
    Turns items into messages: the reasoning, texts and calls of one turn are one assistant message.

    A turn ends where the next reasoning begins after text or calls, and at every item that is not the model's.
    """

    ignored: set[str]
    messages: list[dict[str, Any]] = field(factory=list)

    def add(self, item: Fields) -> None:
        """Add an item; `CallRefusedError` names it if its type is not served."""
        kind = item.text("type") or "message"
        if kind == "message":
            self._add_message(item)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind == "function_call":
            self._add_call(item)
        elif kind == "function_call_output":
            content = read_parts(item, "output", _TEXT_PARTS, "\n")
            call_id = item.required_text("call_id")
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            raise refuse_unsupported(item.path, f"items of type {kind!r} are not served")

    def _turn(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _add_message(self, item: Fields) -> None:
        role = item.text("role")
        if role in _ROLES:
            content = read_parts(item, "content", _TEXT_PARTS, "\n")
            self.messages.append({"role": _ROLES[role], "content": content})
        elif role == "assistant":
            # Some clients send reasoning as a message before that of the text: both are one turn.
            turn, text = self._turn(), read_parts(item, "content", _TEXT_PARTS, "")
            turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text
        else:
            raise refuse(item.name("role"), "must be system, developer, user or assistant")

    def _add_reasoning(self, item: Fields) -> None:
        turn = self._turn()
        if turn["content"] or "tool_calls" in turn:
            turn = {"role": "assistant", "content": ""}
            self.messages.append(turn)
        text = read_parts(item, "content", _TEXT_PARTS, "") or read_parts(item, "summary", _TEXT_PARTS, "")
        if text := text or self._read_encrypted(item):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _read_encrypted(self, item: Fields) -> str:
        content = item.text("encrypted_content") or ""
        if not content.startswith(ENCRYPTED_PREFIX):
            self.ignored.update({"input.reasoning"} if content else ())
            return ""
        try:
            return base64.b64decode(content.removeprefix(ENCRYPTED_PREFIX), validate=True).decode("utf-8")
        except (binascii.Error, ValueError) as error:
            raise refuse(item.name("encrypted_content"), "was not written by this server") from error

    def _add_call(self, item: Fields) -> None:
        name, space = item.required_text("name"), item.text("namespace")
        function = {"name": f"{space}__{name}" if space else name, "arguments": item.text("arguments") or ""}
        call = {"id": item.required_text("call_id"), "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)


def _read_tools(
    owner: Fields, key: str, space: str, namespaces: dict[str, tuple[str, str]], ignored: set[str]
) -> list[ToolSchema]:
    """Return the functions among tools; those of a namespace get its name as a prefix, kept in `namespaces`."""
    tools: list[ToolSchema] = []
    for tool in owner.objects(key):
        kind = tool.text("type") or ("function" if space else "none")
        if kind == "function":
            name = tool.required_text("name")
            if space:
                namespaces[f"{space}__{name}"] = (space, name)
            if tool.flag("strict"):
                ignored.add("tools.strict")
            full_name = f"{space}__{name}" if space else name
            tools.append(describe_tool(full_name, tool.text("description"), tool.object("parameters")))
        elif kind == "namespace" and not space:
            tools += _read_tools(tool, "tools", tool.required_text("name"), namespaces, ignored)
        else:
            ignored.add(f"tools.{kind}")
    return tools
