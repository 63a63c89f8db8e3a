"""The dialect of Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from attrs import define, field

from turnwise import Message
from turnwise.types import JsonDict, ToolSchema
from turnwise_gateway.calls import (
    CallRefusedError,
    Constraint,
    ModelCall,
    ModelReply,
    SessionBackend,
)
from turnwise_gateway.contents import Content, build_content, text_part
from turnwise_gateway.dialects.constraints import ChoiceForms, read_format
from turnwise_gateway.dialects.dialect import Dialect
from turnwise_gateway.dialects.errors import describe_messages_error
from turnwise_gateway.dialects.exchange import Exchange, Received, ReplyPart, Step, list_parts, write_event
from turnwise_gateway.dialects.field_tables import MESSAGES_FIELDS
from turnwise_gateway.dialects.fields import (
    Fields,
    describe_tool,
    read_parts,
    read_requested_sampling,
    read_template_options,
    refuse,
    refuse_unsupported,
)
from turnwise_gateway.dialects.malformed_input import find_malformed, write_input, write_input_delta
from turnwise_gateway.dialects.pictures import PictureForm, PictureReader, read_content, read_part

_TEXT_PARTS: Final = {"text": "text"}
_CHOICES: Final = ChoiceForms(
    words={"auto": "auto", "none": "none", "any": "required"}, named="tool", one_call="disable_parallel_tool_use"
)
_OF_CLIENTS: Final = ("bash_", "computer_", "memory_", "text_editor_")
"""Types of tools that the client runs and whose schemas the vendor's models have learned."""
_BILLING: Final = "x-anthropic-billing-header:"
"""Lines of the system prompt that begin so are for Anthropic's accounting; their values change between calls."""


def _find_url(block: Fields) -> str:
    """Return the bytes of a picture as a URL; whatever its `media_type` is, the bytes tell the type."""
    source = block.object("source")
    kind = "none" if source is None else source.text("type")
    if source is not None and kind == "url":
        return source.required_text("url")
    if source is None or kind != "base64":
        raise refuse_unsupported(block.name("source"), f"it has the type {kind!r}, and nothing is fetched: send base64")
    return f"data:{source.text('media_type') or ''};base64,{source.required_text('data')}"


_PICTURES: Final = PictureForm("image", _find_url)


@define
class MessagesExchange(Exchange):
    """A call of Messages."""

    _provenance: JsonDict | None = field(default=None, init=False)

    def write_reply(self, reply: ModelReply) -> JsonDict:
        head = self._head(reply) | {"content": [_write_block(reply, part) for part in list_parts(reply)]}
        return head | _write_stop(reply) | {"usage": _write_usage(reply, reply.usage.completion_tokens)}

    def write_events(self, reply: ModelReply) -> bytes:
        events = [*self._write_parts(reply, is_whole=True)]
        usage = _write_usage(reply, reply.usage.completion_tokens)
        provenance = {} if self._provenance == reply.provenance else {"turnwise": dict(reply.provenance)}
        events.append(_event("message_delta", delta=_write_stop(reply), usage=usage, **provenance))
        events.append(_event("message_stop"))
        return b"".join(events)

    def write_part(self, reply: ModelReply) -> bytes:
        return b"".join(self._write_parts(reply, is_whole=False))

    def _write_parts(self, reply: ModelReply, *, is_whole: bool) -> Iterator[bytes]:
        if self._provenance is None:
            # Of the provenance, the weight version is not known before the end of the turn.
            self._provenance = dict(reply.provenance)
            opened = self._head(reply) | {"content": [], "stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message=opened | {"usage": _write_usage(reply, 0)})
        for step in self._sent.steps(list_parts(reply), is_whole=is_whole):
            if step.is_first:
                yield _event("content_block_start", index=step.index, content_block=_write_empty_block(step.part))
            for delta in _write_deltas(step, reply.signature):
                yield _event("content_block_delta", index=step.index, delta=delta)
            if step.is_last:
                yield _event("content_block_stop", index=step.index)

    def write_heartbeat(self) -> bytes:
        return _event("ping")

    def write_failure(self, error: CallRefusedError) -> bytes:
        return write_event(describe_messages_error(error), "error")

    def _head(self, reply: ModelReply) -> JsonDict:
        name = f"{MESSAGES.id_prefix}{reply.id}"
        head: JsonDict = {"id": name, "type": "message", "role": "assistant", "model": self.call.model}
        return head | {"turnwise": dict(reply.provenance)} if reply.provenance else head


def _event(name: str, **values: object) -> bytes:
    return write_event({"type": name, **values}, name)


def _write_block(reply: ModelReply, part: ReplyPart) -> JsonDict:
    if part.call is not None:
        return _write_empty_block(part) | {"input": write_input(part.text)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": reply.signature}
    return {"type": "text", "text": part.text}


def _write_empty_block(part: ReplyPart) -> JsonDict:
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _write_deltas(step: Step, signature: str) -> Iterator[JsonDict]:
    """Return the deltas of a piece of a block."""
    if step.part.kind == "call":
        text = write_input_delta(step.part.text, step.delta) if step.is_last else step.delta
        if text:
            yield {"type": "input_json_delta", "partial_json": text}
        return
    kind = "thinking" if step.part.kind == "reasoning" else "text"
    if step.delta:
        yield {"type": f"{kind}_delta", kind: step.delta}
    if step.is_last and kind == "thinking":
        yield {"type": "signature_delta", "signature": signature}


def _read_input(block: Fields) -> str:
    values = (block.object("input") or Fields({})).values
    malformed = find_malformed(values)
    return json.dumps(values, ensure_ascii=False) if malformed is None else malformed


def _write_stop(reply: ModelReply) -> JsonDict:
    reason = "stop_sequence" if reply.stop is not None and reply.finish == "stop" else MESSAGES.finishes[reply.finish]
    return {"stop_reason": reason, "stop_sequence": reply.stop if reason == "stop_sequence" else None}


def _write_usage(reply: ModelReply, output_tokens: int) -> JsonDict:
    # In this dialect the input leaves out cached tokens; clients add the three counts.
    usage = reply.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": output_tokens,
    }


def _read_request(received: Received) -> MessagesExchange:
    request = Fields(received.body.values)
    request.refuse_fields(MESSAGES_FIELDS.refused)
    ignored: set[str] = set()
    max_tokens = request.integer("max_tokens", 1)
    if max_tokens is None and not received.is_question:
        raise refuse("max_tokens", "must be an integer of at least 1")
    tools = received.read_field(request, "tools", _read_tools, ignored)
    choice, constraints = _CHOICES.read(request, tools, ignored)
    call = ModelCall(
        dialect=MESSAGES.name,
        messages=_read_conversation(received, request, ignored),
        tools=tools,
        tool_choice=choice,
        constraints=(*constraints, *_read_format(request, ignored)),
        max_tokens=max_tokens,
        stop=request.texts("stop_sequences"),
        stop_param="stop_sequences",
        requested_sampling=read_requested_sampling(request, 1.0),
        template_options=read_template_options(request),
        stream=request.flag("stream"),
        model=request.short_text("model"),
    )
    return MessagesExchange(received.complete(call, {*ignored, *request.unread()}))


def _read_format(request: Fields, ignored: set[str]) -> tuple[Constraint, ...]:
    config = request.object("output_config") or Fields({})
    found = (*read_format(config, "format"), *read_format(request, "output_format"))
    ignored.update(("output_config",) if config.unread() else ())
    return found


def _read_conversation(received: Received, request: Fields, ignored: set[str]) -> tuple[Message, ...]:
    head = received.read_field(request, "system", _read_head, ignored)
    messages = received.read_conversation(request, "messages", partial(_add_message, received.pictures), ignored)
    if not request.values.get("messages"):
        raise refuse("messages", "must be a list that is not empty")
    if messages[-1]["role"] == "assistant":
        raise refuse_unsupported("messages", "the last message is the assistant's, and a turn cannot be prefilled")
    return (*head, *messages)


def _read_head(request: Fields, ignored: set[str]) -> tuple[Message, ...]:
    system = _read_system(request, "system")
    return ({"role": "system", "content": system},) if system else ()


def _add_message(pictures: PictureReader | None, messages: list[Message], item: Fields, ignored: set[str]) -> None:
    role = item.text("role")
    if role == "assistant":
        messages.append(_read_assistant(item, ignored))
    elif role == "user":
        messages += _read_user(item, pictures)
    elif role == "system":
        messages.append({"role": "system", "content": _read_system(item, "content")})
    else:
        raise refuse(item.name("role"), "must be user, assistant or system")


def _read_system(owner: Fields, key: str) -> str:
    text = read_parts(owner, key, _TEXT_PARTS, "\n")
    if _BILLING not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(_BILLING))


def _read_user(message: Fields, pictures: PictureReader | None) -> list[Message]:
    """Return the tool results of a user's message, and the texts and pictures between them, in order."""
    if not isinstance(message.value("content"), list):
        return [{"role": "user", "content": message.text("content") or ""}]
    found: list[dict[str, Any]] = []
    for block in message.objects("content"):
        if block.text("type") == "tool_result":
            found.append(_read_result(block, pictures))
            continue
        if not found or found[-1]["role"] != "user":
            found.append({"role": "user", "content": []})
        found[-1]["content"].append(read_part(block, _TEXT_PARTS, _PICTURES, pictures))
    for each in found:
        if each["role"] == "user":
            each["content"] = build_content(each["content"], "\n")
    return [*found] or [{"role": "user", "content": ""}]


def _read_text(block: Fields) -> str:
    if (kind := block.text("type") or "none") != "text":
        raise refuse_unsupported(block.path, f"it has the type {kind!r}, and the model reads text only")
    return block.text("text") or ""


def _read_result(block: Fields, pictures: PictureReader | None) -> dict[str, Any]:
    content = read_content(block, "content", _TEXT_PARTS, "\n", _PICTURES, pictures)
    # Chat Completions has no mark for a failed call, so the text tells the model, once.
    if block.flag("is_error"):
        content = _mark_error(content)
    return {"role": "tool", "tool_call_id": block.required_text("tool_use_id"), "content": content}


def _mark_error(content: Content) -> Content:
    """Return the content of a failed call's result; its text begins with a word for that."""
    if isinstance(content, str):
        is_marked = content.lower().startswith(("error", "<tool_use_error>"))
        return content if is_marked else f"Error: {content}"
    first = content[0].get("text")
    if first is None:
        return [text_part("Error:"), *content]
    return [text_part(str(_mark_error(first))), *content[1:]]


def _read_assistant(message: Fields, ignored: set[str]) -> Message:
    found: dict[str, Any] = {"role": "assistant", "content": ""}
    if not isinstance(message.value("content"), list):
        return found | {"content": message.text("content") or ""}
    calls = []
    for block in message.objects("content"):
        match block.text("type"):
            case "thinking":
                found["reasoning_content"] = found.get("reasoning_content", "") + (block.text("thinking") or "")
            case "redacted_thinking":
                ignored.add("messages.redacted_thinking")
            case "tool_use":
                function = {"name": block.required_text("name"), "arguments": _read_input(block)}
                calls.append({"id": block.required_text("id"), "type": "function", "function": function})
            case _:
                found["content"] += _read_text(block)
    return found | {"tool_calls": calls} if calls else found


def _read_tools(request: Fields, ignored: set[str]) -> tuple[ToolSchema, ...]:
    tools = []
    for tool in request.objects("tools"):
        if (kind := tool.text("type") or "custom") != "custom":
            if kind.startswith(_OF_CLIENTS):
                reason = f"the model does not know the tool {kind!r}, so send it as a tool with a schema"
                raise refuse_unsupported(tool.path, reason)
            ignored.add(f"tools.{kind}")  # the vendor runs it, and coding agents work without it
            continue
        name, description = tool.required_text("name"), tool.text("description")
        tools.append(describe_tool(name, description, tool.object("input_schema")))
    return tuple(tools)


async def _count_tokens(session: SessionBackend, call: ModelCall) -> JsonDict:
    return {"input_tokens": await session.count_tokens(call)}


MESSAGES: Final = Dialect(
    name="messages",
    path="v1/messages",
    questions={"v1/messages/count_tokens": _count_tokens},
    header="anthropic-version",
    fields=MESSAGES_FIELDS,
    list_key="messages",
    id_prefix="msg_",
    finishes={"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
    read=_read_request,
    describe_error=describe_messages_error,
)
