"""The dialect of Chat Completions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

from attrs import define, field

from turnwise import Message
from turnwise.types import JsonDict, ToolSchema
from turnwise_gateway.calls import CallOfTool, CallRefusedError, ModelCall, ModelReply, Usage
from turnwise_gateway.dialects.answers import check_answers, find_answered_call, unanswered_calls
from turnwise_gateway.dialects.constraints import ChoiceForms, read_format, read_parallel
from turnwise_gateway.dialects.dialect import Dialect
from turnwise_gateway.dialects.errors import describe_openai_error
from turnwise_gateway.dialects.exchange import Exchange, Received, Step, list_logprobs, list_parts, write_event
from turnwise_gateway.dialects.field_tables import CHAT_FIELDS
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

_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_ROLES: Final = {"system": "system", "developer": "system"}
_BY_POSITION: Final = "messages.tool_call_id"
"""Counted among the ignored fields of a conversation in which a tool message has no id of its call."""
_CHOICES: Final = ChoiceForms(
    words={"auto": "auto", "none": "none", "required": "required"},
    named="function",
    holder="function",
    allowed="allowed_tools",
)


def _find_url(part: Fields) -> str:
    """Return the URL of a picture; `detail` has no effect, for the model's processor decides the size."""
    return (part.object("image_url") or Fields({}, part.name("image_url"))).required_text("url")


_PICTURES: Final = PictureForm("image_url", _find_url)


@define
class ChatExchange(Exchange):
    """A call of Chat Completions; a stream has a chunk with the usage if the request asks for it."""

    include_usage: bool = False
    created: int = field(factory=lambda: int(time.time()))
    _is_open: bool = field(default=False, init=False)
    _said_content: bool = field(default=False, init=False)

    def write_reply(self, reply: ModelReply) -> JsonDict:
        choice: JsonDict = {
            "index": 0,
            "message": _write_message(reply),
            "finish_reason": CHAT.finishes[reply.finish],
            "logprobs": self._logprobs(reply),
        }
        body = self._head(reply, "chat.completion") | {"choices": [choice], "usage": _write_usage(reply.usage)}
        return body | {"turnwise": dict(reply.provenance)} if reply.provenance else body

    def write_events(self, reply: ModelReply) -> bytes:
        head = self._head(reply, "chat.completion.chunk")
        has_content = not _has_null_content(reply)
        events = self._write_parts(reply, has_content=has_content, logprobs=self._logprobs(reply), is_whole=True)
        if reply.provenance:
            head = head | {"turnwise": dict(reply.provenance)}
        events.append(_chunk(head, {}, CHAT.finishes[reply.finish]))
        if self.include_usage:
            events.append(write_event(head | {"choices": [], "usage": _write_usage(reply.usage)}))
        return b"".join(events) + b"data: [DONE]\n\n"

    def write_part(self, reply: ModelReply) -> bytes:
        return b"".join(self._write_parts(reply, has_content=bool(reply.content), is_whole=False))

    def _write_parts(
        self, reply: ModelReply, *, has_content: bool, logprobs: JsonDict | None = None, is_whole: bool
    ) -> list[bytes]:
        """Return the chunks of the role and the parts; `has_content` is whether the content is a text, not null."""
        head, events = self._head(reply, "chat.completion.chunk"), []
        if not self._is_open:
            self._is_open, self._said_content = True, has_content
            events.append(_chunk(head, {"role": "assistant", "content": "" if has_content else None}))
        numbers = {call.id: number for number, call in enumerate(reply.tool_calls)}
        for step in self._sent.steps(list_parts(reply), is_whole=is_whole):
            if (call := step.part.call) is not None:
                events += _write_call_step(head, numbers[call.id], call, step)
                continue
            is_content = step.part.kind == "content"
            values, logprobs = (logprobs, None) if is_content else (None, logprobs)
            if step.delta or values:
                delta: JsonDict = {"content" if is_content else "reasoning_content": step.delta} if step.delta else {}
                events.append(_chunk(head, delta, logprobs=values))
        if logprobs:
            events.append(_chunk(head, {}, logprobs=logprobs))
        if has_content and not reply.content and not self._said_content:
            self._said_content = True
            events.append(_chunk(head, {"content": ""}))
        return events

    def write_heartbeat(self) -> bytes:
        return b": ping\n\n"

    def write_failure(self, error: CallRefusedError) -> bytes:
        return write_event(describe_openai_error(error))

    def _head(self, reply: ModelReply, kind: str) -> JsonDict:
        return {"id": f"{CHAT.id_prefix}{reply.id}", "object": kind, "created": self.created, "model": self.call.model}

    def _logprobs(self, reply: ModelReply) -> JsonDict | None:
        return {"content": list_logprobs(reply), "refusal": None} if self.call.logprobs else None


def _chunk(head: JsonDict, delta: JsonDict, finish: str | None = None, logprobs: JsonDict | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return write_event(head | {"choices": [choice]})


def _write_call_step(head: JsonDict, number: int, call: CallOfTool, step: Step) -> list[bytes]:
    """Return the chunks of a piece of a call."""
    events = []
    if step.is_first:
        events.append(_chunk(head, {"tool_calls": [{"index": number} | _write_call(call, "")]}))
    if step.delta or (step.is_first and step.is_last):
        events.append(_chunk(head, {"tool_calls": [{"index": number, "function": {"arguments": step.delta}}]}))
    return events


def _has_null_content(reply: ModelReply) -> bool:
    return not reply.content and bool(reply.tool_calls)


def _write_message(reply: ModelReply) -> JsonDict:
    message: JsonDict = {
        "role": "assistant",
        "content": None if _has_null_content(reply) else reply.content,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [_write_call(call, call.arguments) for call in reply.tool_calls]
    return message


def _write_call(call: CallOfTool, arguments: str) -> JsonDict:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _write_usage(usage: Usage) -> JsonDict:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _read_request(received: Received) -> ChatExchange:
    request = Fields(received.body.values)
    request.refuse_fields(CHAT_FIELDS.refused)
    options = request.object("stream_options") or Fields({})
    ignored: set[str] = set()
    tools = received.read_field(request, "tools", _read_tools, ignored)
    choice, constraints = _CHOICES.read(request, tools, ignored)
    call = ModelCall(
        dialect=CHAT.name,
        messages=_read_messages(received, request, ignored),
        tools=tools,
        tool_choice=choice,
        constraints=(
            *constraints,
            *read_parallel(request, "parallel_tool_calls", is_one=False),
            *read_format(request, "response_format", "json_schema"),
        ),
        max_tokens=_read_max_tokens(request),
        stop=request.texts("stop", may_be_one=True),
        requested_sampling=read_requested_sampling(request),
        template_options=read_template_options(request),
        logprobs=request.flag("logprobs"),
        stream=request.flag("stream"),
        model=request.short_text("model"),
    )
    include_usage = options.flag("include_usage")
    return ChatExchange(received.complete(call, {*ignored, *request.unread(), *options.unread()}), include_usage)


def _read_max_tokens(request: Fields) -> int | None:
    new, old = request.integer("max_completion_tokens", 1), request.integer("max_tokens", 1)
    return old if new is None else new


def _read_messages(received: Received, request: Fields, ignored: set[str]) -> tuple[Message, ...]:
    add = partial(_add_message, received.pictures)
    messages = received.read_conversation(request, "messages", add, ignored)
    if not messages:
        raise refuse("messages", "must be a list that is not empty")
    if _BY_POSITION in ignored:
        check_answers(messages, "messages")
    return tuple(messages)


def _add_message(pictures: PictureReader | None, messages: list[Message], item: Fields, ignored: set[str]) -> None:
    if item.value("role") != "tool":
        if _BY_POSITION in ignored:
            check_answers(messages, item.path)
        messages.append(_read_message(item, pictures, ignored))
        return
    content = read_content(item, "content", _TEXT_PARTS, "\n", _PICTURES, pictures)
    if not (call_id := item.text("tool_call_id")):
        call_id = find_answered_call(messages, item.name("tool_call_id"))
        ignored.add(_BY_POSITION)
    elif _BY_POSITION in ignored and call_id not in unanswered_calls(messages):
        raise refuse(item.name("tool_call_id"), "names a call that a message without an id has answered by its place")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _read_message(message: Fields, pictures: PictureReader | None, ignored: set[str]) -> Message:
    role = message.text("role")
    if message.text("name"):
        ignored.add("messages.name")
    if role == "user":
        content = read_content(message, "content", _TEXT_PARTS, "\n", _PICTURES, pictures)
        return {"role": role, "content": content}
    if role in _ROLES:
        return {"role": _ROLES[role], "content": read_parts(message, "content", _TEXT_PARTS, "\n")}
    if role == "assistant":
        return _read_assistant(message)
    raise refuse(message.name("role"), "must be system, developer, user, assistant or tool")


def _read_assistant(message: Fields) -> Message:
    if message.value("function_call") is not None:
        raise refuse_unsupported(message.name("function_call"), "use tool_calls")
    refuse_prefill(message)
    found: dict[str, object] = {"role": "assistant", "content": read_parts(message, "content", _TEXT_PARTS, "")}
    # Some clients send both names with one text.
    if reasoning := message.text("reasoning_content") or message.text("reasoning"):
        found["reasoning_content"] = reasoning
    if calls := [_read_call(each) for each in message.objects("tool_calls")]:
        found["tool_calls"] = calls
    return found


def _read_call(call: Fields) -> dict[str, Any]:
    if (kind := call.text("type") or "function") != "function":
        raise refuse_unsupported(call.name("type"), f"calls of type {kind!r} are not served")
    function = call.object("function")
    if function is None:
        raise refuse(call.name("function"), "must be an object")
    named = {"name": function.required_text("name"), "arguments": function.text("arguments") or ""}
    return {"id": call.required_text("id"), "type": "function", "function": named}


def _read_tools(request: Fields, ignored: set[str]) -> tuple[ToolSchema, ...]:
    tools = []
    for tool in request.objects("tools"):
        if (kind := tool.required_text("type")) != "function":
            ignored.add(f"tools.{kind}")
            continue
        function = tool.object("function")
        if function is None:
            raise refuse(tool.name("function"), "must be an object")
        if function.flag("strict"):
            ignored.add("tools.strict")
        name, description = function.required_text("name"), function.text("description")
        tools.append(describe_tool(name, description, function.object("parameters")))
    return tuple(tools)


CHAT: Final = Dialect(
    name="chat",
    path="v1/chat/completions",
    fields=CHAT_FIELDS,
    list_key="messages",
    id_prefix="chatcmpl-",
    finishes={"stop": "stop", "length": "length", "tool_calls": "tool_calls"},
    read=_read_request,
    describe_error=describe_openai_error,
)
