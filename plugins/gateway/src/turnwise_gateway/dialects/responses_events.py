"""Replies in the dialect of Responses: the object, and its numbered events."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from attrs import define, field

from turnwise_gateway.calls import CallOfTool, CallRefusedError, Finish, ModelReply, Usage
from turnwise_gateway.dialects.errors import code_of
from turnwise_gateway.dialects.exchange import Exchange, ReplyPart, Step, list_logprobs, list_parts, write_event

_Item = dict[str, Any]

ENCRYPTED_PREFIX: Final = "turnwise:"
"""Begins the `encrypted_content` of our reasoning items, which is the text for clients that drop summaries."""
STATUSES: Final[Mapping[Finish, str]] = {"stop": "completed", "length": "incomplete", "tool_calls": "completed"}
_PART_INDEX: Final = {"message": "content_index", "reasoning": "summary_index"}


@define
class ResponsesExchange(Exchange):
    """
    A call of Responses. The id of the response is drawn before there is a reply, since heartbeats repeat it.

    Attributes:
        id: of the response.
        keep: called with the response, for requests that name it later; None keeps nothing.
        namespaces: name of each flattened tool, with its namespace and its name in there.
        encrypts: the client asked for `encrypted_content`.
    """

    id: str
    keep: Callable[[_Item], None] | None = None
    namespaces: Mapping[str, tuple[str, str]] = field(factory=dict)
    encrypts: bool = False
    _written: list[_Item] = field(factory=list, init=False)
    _created_at: int = field(factory=lambda: int(time.time()))
    _num_events: int = 0

    def write_reply(self, reply: ModelReply) -> _Item:
        status = STATUSES[reply.finish]
        body = self._response(status, self._items(reply)) | {
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": _write_usage(reply.usage),
        }
        if self.keep is not None:
            self.keep(body)
        return body | {"turnwise": dict(reply.provenance)} if reply.provenance else body

    def write_events(self, reply: ModelReply) -> bytes:
        response = self.write_reply(reply)
        events = [self._open(), *self._write_parts(reply, response["output"], is_whole=True)]
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def write_part(self, reply: ModelReply) -> bytes:
        items = self._items(reply)
        events = [self._open(), *self._write_parts(reply, items, is_whole=False)]
        self._written = [*items[:-1], _begin(items[-1])]
        return b"".join(events)

    def write_heartbeat(self) -> bytes:
        # An event and no comment, which does not reset the idle timer of Codex.
        return self._open() or self._event(
            "response.in_progress", response=self._response("in_progress", self._written)
        )

    def write_failure(self, error: CallRefusedError) -> bytes:
        failed = self._response("failed", []) | {"error": {"code": code_of(error), "message": error.message}}
        return self._open() + self._event("response.failed", response=failed)

    def _open(self) -> bytes:
        if self._num_events:
            return b""
        response = self._response("in_progress", [])
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _event(self, name: str, /, **values: object) -> bytes:
        number = self._num_events
        self._num_events += 1
        return write_event({"type": name, "sequence_number": number, **values}, name)

    def _response(self, status: str, output: list[_Item]) -> _Item:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.call.model,
            "output": output,
            "parallel_tool_calls": True,
            "store": False,
            "temperature": None,
            "tool_choice": self.call.tool_choice,
            "tools": [],
            "top_p": None,
            "usage": None,
        }

    def _parts(self, reply: ModelReply) -> list[ReplyPart]:
        parts = list_parts(reply)
        if self.call.logprobs and reply.token_texts and not reply.content:  # an item for them
            parts.insert(bool(reply.reasoning), ReplyPart("content", ""))
        return parts

    def _items(self, reply: ModelReply) -> list[_Item]:
        parts = self._parts(reply)
        texts = [index for index, part in enumerate(parts) if part.kind == "content"]
        items: list[_Item] = []
        for index, part in enumerate(parts):
            if part.call is not None:
                items.append(self._write_call(part.call))
            elif part.kind == "reasoning":
                items.append(self._write_reasoning(reply))
            else:
                is_end = index == len(parts) - 1
                number = texts.index(index)
                items.append(self._write_text(reply, part, number, is_last=index == texts[-1], is_end=is_end))
        return items

    def _write_text(self, reply: ModelReply, text: ReplyPart, number: int, *, is_last: bool, is_end: bool) -> _Item:
        """Return a message; the last one has the log-probabilities, and one at the end the mark of a cut turn."""
        logprobs = list_logprobs(reply) if self.call.logprobs and is_last else []  # none of a part of a reply
        part = {"type": "output_text", "text": text.text, "annotations": [], "logprobs": logprobs}
        name = f"msg_{reply.id}-{number}" if number else f"msg_{reply.id}"
        item: _Item = {"type": "message", "id": name, "role": "assistant", "content": [part]}
        return item | {"status": STATUSES[reply.finish] if is_end else "completed"}

    def _write_reasoning(self, reply: ModelReply) -> _Item:
        # A summary and not `content`, which Codex does not send back.
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        item: _Item = {"type": "reasoning", "id": f"rs_{reply.id}", "summary": summary}
        if self.encrypts:
            text = base64.b64encode(reply.reasoning.encode("utf-8")).decode("ascii")
            item["encrypted_content"] = ENCRYPTED_PREFIX + text
        return item

    def _write_call(self, call: CallOfTool) -> _Item:
        status = "in_progress" if call.is_open else "completed"
        item: _Item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "status": status}
        item |= {"name": call.name, "arguments": call.arguments}
        if call.name in self.namespaces:
            item["namespace"], item["name"] = self.namespaces[call.name]
        return item

    def _write_parts(self, reply: ModelReply, items: list[_Item], *, is_whole: bool) -> Iterator[bytes]:
        """Yield the events of the items, as far as they have come."""
        writers = {
            "message": self._write_message,
            "reasoning": self._write_summary,
            "function_call": self._write_call_step,
        }
        for step in self._sent.steps(self._parts(reply), is_whole=is_whole):
            item = items[step.index]
            if step.is_first:
                yield self._event("response.output_item.added", output_index=step.index, item=_empty(item))
            place = {"item_id": item["id"], "output_index": step.index}
            if item["type"] in _PART_INDEX:
                place[_PART_INDEX[item["type"]]] = 0
            yield from writers[item["type"]](place, item, step)
            if step.is_last:
                yield self._event("response.output_item.done", output_index=step.index, item=item)

    def _write_message(self, place: _Item, item: _Item, step: Step) -> Iterator[bytes]:
        (part,) = item["content"]
        said = {"logprobs": part["logprobs"]}
        if step.is_first:
            empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.content_part.added", **place, part=empty)
        if step.is_first or step.delta or part["logprobs"]:
            yield self._event("response.output_text.delta", **place, delta=step.delta, **said)
        if step.is_last:
            yield self._event("response.output_text.done", **place, text=part["text"], **said)
            yield self._event("response.content_part.done", **place, part=part)

    def _write_summary(self, place: _Item, item: _Item, step: Step) -> Iterator[bytes]:
        (part,) = item["summary"]
        if step.is_first:
            empty = {"type": "summary_text", "text": ""}
            yield self._event("response.reasoning_summary_part.added", **place, part=empty)
        if step.delta:
            yield self._event("response.reasoning_summary_text.delta", **place, delta=step.delta)
        if step.is_last:
            yield self._event("response.reasoning_summary_text.done", **place, text=part["text"])
            yield self._event("response.reasoning_summary_part.done", **place, part=part)

    def _write_call_step(self, place: _Item, item: _Item, step: Step) -> Iterator[bytes]:
        if step.delta or (step.is_first and step.is_last):
            yield self._event("response.function_call_arguments.delta", **place, delta=step.delta)
        if step.is_last:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **said)


def _begin(item: _Item) -> _Item:
    """Return the last item of a part of a reply; a call knows whether it has ended."""
    return item if item["type"] == "function_call" else item | {"status": "in_progress"}


def _empty(item: _Item) -> _Item:
    """Return an item as it begins."""
    if item["type"] == "function_call":
        return item | {"status": "in_progress", "arguments": ""}
    if item["type"] == "message":
        return item | {"status": "in_progress", "content": []}
    return {name: value for name, value in item.items() if name != "encrypted_content"} | {"summary": []}


def _write_usage(usage: Usage) -> _Item:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
