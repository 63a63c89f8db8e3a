"""The dialect of OpenAI's Responses; a request may name the state of its session."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from turnwise import Message
from turnwise.types import ToolSchema
from turnwise_gateway.calls import Constraint, ModelCall
from turnwise_gateway.dialects.constraints import ChoiceForms, read_format, read_parallel
from turnwise_gateway.dialects.dialect import Dialect
from turnwise_gateway.dialects.errors import describe_openai_error
from turnwise_gateway.dialects.exchange import Received
from turnwise_gateway.dialects.field_tables import RESPONSES_FIELDS
from turnwise_gateway.dialects.fields import (
    Fields,
    describe_tool,
    read_parts,
    read_requested_sampling,
    read_template_options,
    refuse,
    refuse_prefill,
    refuse_unsupported,
)
from turnwise_gateway.dialects.pictures import PictureForm, PictureReader, read_content
from turnwise_gateway.dialects.responses_events import ENCRYPTED_PREFIX, STATUSES, ResponsesExchange

_TEXT_PARTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_AGENT_PARTS: Final = {"input_text": "text", "encrypted_content": "encrypted_content"}
"""The parts of a message between agents of Codex: a header, and the text, which only OpenAI's own server encrypts."""
_CHOICES: Final = ChoiceForms(
    words={"auto": "auto", "none": "none", "required": "required"}, named="function", allowed=""
)
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDED: Final = frozenset({_LOGPROBS, _ENCRYPTED})
"""The parts of a response that a request may ask for."""
_ROLES: Final = {"system": "system", "developer": "system"}
_STATE: Final = ("conversation", "prompt")


def _find_url(part: Fields) -> str:
    """Return the URL of a picture; `detail` has no effect, for the model's processor decides the size."""
    if part.value("file_id") is not None:
        raise refuse_unsupported(part.name("file_id"), "no files are stored: send a 'data:' URL as 'image_url'")
    return part.required_text("image_url")


_PICTURES: Final = PictureForm("input_image", _find_url)


def _read_request(received: Received) -> ResponsesExchange:
    request = Fields(received.body.values)
    request.refuse_fields(RESPONSES_FIELDS.refused)
    ignored: set[str] = set()
    _refuse_state(request)
    tools, namespaces = received.read_field(request, "tools", _read_all_tools, ignored)
    include, options = request.texts("include"), request.object("stream_options") or Fields({})
    ignored.update((*options.unread(), *(() if {*include} <= _INCLUDED else ("include",))))
    choice, constraints = _CHOICES.read(request, tools, ignored, [name for _, name in namespaces.values()])
    conversation = _read_conversation(received, request, ignored)
    instructions = request.text("instructions")
    head: tuple[Message, ...] = ({"role": "system", "content": instructions},) if instructions else ()
    call = ModelCall(
        dialect=RESPONSES.name,
        messages=(*head, *conversation),
        tools=tools,
        tool_choice=choice,
        constraints=(
            *constraints,
            *read_parallel(request, "parallel_tool_calls", is_one=False),
            *_read_format(request, ignored),
        ),
        max_tokens=request.integer("max_output_tokens", 1),
        requested_sampling=read_requested_sampling(request),
        template_options=read_template_options(request),
        logprobs=_LOGPROBS in include,
        stream=request.flag("stream"),
        model=request.short_text("model"),
    )
    keeps = request.value("store") is None or request.flag("store")
    call = received.complete(call, {*ignored, *request.unread()})

    def keep(response: Mapping[str, Any]) -> None:
        messages = list(conversation)
        for item in response["output"]:
            _add_item(None, messages, Fields(item), set())
        received.responses.keep(response["id"], messages, response["output"])

    return ResponsesExchange(
        call,
        namespaces=namespaces,
        encrypts=_ENCRYPTED in include,
        id=received.responses.name_response(call.digest),
        keep=keep if keeps else None,
    )


def _refuse_state(request: Fields) -> None:
    for key in _STATE:
        if request.value(key) is not None:
            raise refuse_unsupported(key, "send the whole conversation in 'input'")
    if request.flag("background"):
        raise refuse_unsupported("background", "replies are not stored")


def _read_format(request: Fields, ignored: set[str]) -> tuple[Constraint, ...]:
    text = request.object("text") or Fields({})
    found = read_format(text, "format")
    ignored.update(text.unread())
    return found


def _read_conversation(received: Received, request: Fields, ignored: set[str]) -> tuple[Message, ...]:
    """Return the messages of the response that the request continues, and of its input."""

    def add(messages: list[Message], item: Fields, found: set[str]) -> None:
        _add_item(received.pictures, messages, _resolve(item, received), found)

    messages = _read_earlier(received, request)
    if isinstance(request.value("input"), str):
        messages.append({"role": "user", "content": request.text("input")})
    elif messages:  # the messages of the input depend on those before, which another body with this input has not
        for item in request.objects("input"):
            add(messages, item, ignored)
    else:
        messages += received.read_conversation(request, "input", add, ignored)
    if not request.values.get("input"):
        raise refuse("input", "must be a string or a list, and not be empty")
    return tuple(messages)


def _read_earlier(received: Received, request: Fields) -> list[Message]:
    name = request.text("previous_response_id")
    if name is None:
        return []
    found = received.responses.find_conversation(name)
    if found is None:
        raise refuse_unsupported("previous_response_id", "it names no response of this session: send all of 'input'")
    return list(found)


def _resolve(item: Fields, received: Received) -> Fields:
    """Return the item that a reference names, or else the item itself."""
    if item.text("type") != "item_reference":
        return item
    found = received.responses.find_item(item.required_text("id"))
    if found is None:
        raise refuse_unsupported(item.path, "it refers to no item of this session, so send the item itself")
    return Fields(dict(found), item.path)


def _add_item(pictures: PictureReader | None, messages: list[Message], item: Fields, ignored: set[str]) -> None:
    """
    Add an item: the reasoning, texts and calls of one turn are one assistant message.

    A turn ends where the next reasoning begins after text or calls, and at every item that is not the model's.
    `CallRefusedError` names the item if its type is not served.
    """
    kind = item.text("type") or "message"
    if kind == "message":
        _add_message(messages, item, pictures)
    elif kind == "reasoning":
        _add_reasoning(messages, item, ignored)
    elif kind == "function_call":
        _add_call(messages, item)
    elif kind == "function_call_output":
        content = read_content(item, "output", _TEXT_PARTS, "\n", _PICTURES, pictures)
        messages.append({"role": "tool", "tool_call_id": item.required_text("call_id"), "content": content})
    elif kind == "agent_message":
        messages.append({"role": "user", "content": read_parts(item, "content", _AGENT_PARTS, "")})
    else:
        raise refuse_unsupported(item.path, f"items of type {kind!r} are not served")


def _take_turn(messages: list[Message]) -> dict[str, Any]:
    """Return a copy of the turn at the end, which takes its place, or else a new turn."""
    if messages and messages[-1]["role"] == "assistant":
        turn = {**messages[-1]}
        messages[-1] = turn
    else:
        messages.append(turn := {"role": "assistant", "content": ""})
    return turn


def _add_message(messages: list[Message], item: Fields, pictures: PictureReader | None) -> None:
    role = item.text("role")
    if role == "user":
        content = read_content(item, "content", _TEXT_PARTS, "\n", _PICTURES, pictures)
        messages.append({"role": role, "content": content})
    elif role in _ROLES:
        messages.append({"role": _ROLES[role], "content": read_parts(item, "content", _TEXT_PARTS, "\n")})
    elif role == "assistant":
        refuse_prefill(item)
        # Some clients send reasoning as a message before that of the text: both are one turn.
        turn, text = _take_turn(messages), read_parts(item, "content", _TEXT_PARTS, "")
        # Text behind a call is another message of the same text.
        between = "" if "tool_calls" in turn else "\n"
        turn["content"] = f"{turn['content']}{between}{text}" if turn["content"] else text
    else:
        raise refuse(item.name("role"), "must be system, developer, user or assistant")


def _add_reasoning(messages: list[Message], item: Fields, ignored: set[str]) -> None:
    turn = _take_turn(messages)
    if turn["content"] or "tool_calls" in turn:
        messages.append(turn := {"role": "assistant", "content": ""})
    text = read_parts(item, "content", _TEXT_PARTS, "") or read_parts(item, "summary", _TEXT_PARTS, "")
    if text := text or _read_encrypted(item, ignored):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text


def _read_encrypted(item: Fields, ignored: set[str]) -> str:
    content = item.text("encrypted_content") or ""
    if not content.startswith(ENCRYPTED_PREFIX):
        ignored.update({"input.reasoning"} if content else ())
        return ""
    try:
        return base64.b64decode(content.removeprefix(ENCRYPTED_PREFIX), validate=True).decode("utf-8")
    except (binascii.Error, ValueError) as error:
        raise refuse(item.name("encrypted_content"), "was not written by this server") from error


def _add_call(messages: list[Message], item: Fields) -> None:
    name, space = item.required_text("name"), item.text("namespace")
    function = {"name": f"{space}__{name}" if space else name, "arguments": item.text("arguments") or ""}
    call = {"id": item.required_text("call_id"), "type": "function", "function": function}
    turn = _take_turn(messages)
    turn["tool_calls"] = [*turn.get("tool_calls", ()), call]


def _read_all_tools(request: Fields, ignored: set[str]) -> tuple[tuple[ToolSchema, ...], Mapping[str, tuple[str, str]]]:
    """Return the functions among the tools, and the namespace and name of each that has one."""
    namespaces: dict[str, tuple[str, str]] = {}
    return tuple(_read_tools(request, "tools", "", namespaces, ignored)), namespaces


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


RESPONSES: Final = Dialect(
    name="responses",
    path="v1/responses",
    fields=RESPONSES_FIELDS,
    list_key="input",
    id_prefix="msg_",
    finishes=STATUSES,
    read=_read_request,
    describe_error=describe_openai_error,
)
