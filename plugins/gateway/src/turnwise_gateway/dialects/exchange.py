"""A request that was understood, and the ways to write its reply."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np
from attrs import define, evolve, field, frozen

from turnwise import Message
from turnwise.types import JsonDict
from turnwise_gateway.calls import CallOfTool, CallRefusedError, ModelCall, ModelReply
from turnwise_gateway.dialects.fields import Fields
from turnwise_gateway.dialects.pictures import PictureReader
from turnwise_gateway.dialects.request_body import Mark, RequestBody, RequestMemory
from turnwise_gateway.dialects.response_store import ResponseStore
from turnwise_gateway.dialects.strict_json import write_json

T = TypeVar("T")
AddItem = Callable[[list[Message], Fields, set[str]], None]

_MAX_IGNORED = 32
_MAX_IGNORED_CHARS = 64
_SECRET_HEADER = re.compile("auth|cookie|credential|key|password|secret|token")
"""In the names of headers with keys, also for proxies and other vendors, such as `x-goog-api-key`."""
_KEY_OF_REQUEST = "idempotency-key"


def keep_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request without keys, with names in lower case; request files have them."""
    named = ((name.lower(), value) for name, value in headers.items())
    return {name: value for name, value in named if _is_kept(name)}


@lru_cache(maxsize=256)  # a client sends the same headers each time
def _is_kept(name: str) -> bool:
    return name == _KEY_OF_REQUEST or not _SECRET_HEADER.search(name)


@frozen
class Received:
    """
    A request as it came.

    Attributes:
        body: parsed.
        headers: names in lower case, without keys.
        source: the body as it came.
        is_question: no reply of the model is asked for.
        responses: of the session.
        pictures: reads its pictures; None if the run takes none.
    """

    body: RequestBody
    headers: Mapping[str, str]
    source: bytes
    is_question: bool
    responses: ResponseStore
    pictures: PictureReader | None

    @classmethod
    def of(
        cls,
        body: RequestBody,
        headers: Mapping[str, str],
        source: bytes,
        memory: RequestMemory,
        *,
        is_question: bool,
    ) -> Received:
        """Return a request without the headers that have keys."""
        return cls(body, keep_headers(headers), source, is_question, memory.responses, memory.pictures)

    def read_conversation(self, request: Fields, key: str, add: AddItem, ignored: set[str]) -> list[Message]:
        """
        Return the messages in a list of items; items of an earlier body give the same objects as before.

        Args:
            request: fields of the body.
            key: of the list.
            add: adds the messages of an item to those before it, and names of ignored fields to a set. It may replace
                the last message, and changes no message.
            ignored: receives the names of ignored fields.
        """
        reading = self.body.reading
        messages, marks = reading.messages, reading.marks
        found = set(marks[-1].ignored) if marks else set()
        for item in request.objects(key, len(marks)):
            add(messages, item, found)
            before = marks[-1].ignored if marks else frozenset()
            last = messages[-1] if messages else None
            marks.append(Mark(len(messages), last, before if len(before) == len(found) else frozenset(found)))
        ignored |= found
        return messages

    def read_field(self, request: Fields, key: str, read: Callable[[Fields, set[str]], T], ignored: set[str]) -> T:
        """Return the result of reading a field, which an earlier body already has if the value is the same object."""
        tail, value = self.body.tail, request.value(key)
        derived = tail.derived if key in tail.values else self.body.reading.derived
        known = derived.get(key)
        if known is None or known[0] is not value:
            names: set[str] = set()
            result = read(request, names)
            derived[key] = known = (value, (result, names))
        found: tuple[T, set[str]] = known[1]
        ignored |= found[1]
        return found[0]

    def complete(self, call: ModelCall, ignored: Set[str]) -> ModelCall:
        """
        Return a call with digest, key, headers, body, and the sorted names of ignored fields.

        A client may invent any number of names, and each becomes a metric, so all but some short ones are `other`.
        """
        short = sorted(name for name in ignored if len(name) <= _MAX_IGNORED_CHARS)[:_MAX_IGNORED]
        names = sorted({*short, "other"}) if len(short) < len(ignored) else short
        return evolve(
            call,
            digest=self.body.digest,
            key=self.headers.get(_KEY_OF_REQUEST, ""),
            headers=self.headers,
            ignored=tuple(names),
            body=self.source,
        )


@frozen
class ReplyPart:
    """
    A part of a reply: its reasoning, a text of its content, or the arguments of a call.

    Attributes:
        kind: of the part.
        text: of the part.
        call: whose arguments the text is; None for another kind.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str
    call: CallOfTool | None = None

    @property
    def name(self) -> tuple[str, ...]:
        """What stays the same while the text grows."""
        return (self.kind,) if self.call is None else (self.kind, self.call.id, self.call.name)


@frozen
class Step:
    """
    The next piece of a part of a reply.

    Attributes:
        index: of the part in its reply.
        part: as far as it has come.
        is_first: nothing of the part was sent before.
        delta: its characters that were not sent before.
        is_last: the part is whole.
    """

    index: int
    part: ReplyPart
    is_first: bool
    delta: str
    is_last: bool


@define
class Sent:
    """The parts of a reply that a stream has sent, one after the other; the last one may grow."""

    _parts: list[tuple[tuple[str, ...], str]] = field(factory=list)
    _num_whole: int = 0

    def steps(self, parts: Sequence[ReplyPart], *, is_whole: bool) -> Iterator[Step]:
        """
        Return the next pieces of a reply, and take them as sent.

        Args:
            parts: of the reply so far.
            is_whole: the last part is whole.

        Raises:
            ValueError: the reply does not begin with all that was sent.
        """
        for index, part in enumerate(parts):
            is_first = index == len(self._parts)
            name, sent = (part.name, "") if is_first else self._parts[index]
            is_over = index < self._num_whole
            if name != part.name or not part.text.startswith(sent) or (is_over and part.text != sent):
                raise ValueError(f"the {part.kind} of the reply is not the one that was sent")
            self._parts[index : index + 1] = [(name, part.text)]
            if not is_over:
                has_ended = part.call is not None and not part.call.is_open
                is_last = is_whole or index + 1 < len(parts) or has_ended
                self._num_whole += is_last
                yield Step(index, part, is_first, part.text[len(sent) :], is_last)
        if len(parts) < len(self._parts):
            raise ValueError("the reply lacks a text that was sent")


@define
class Exchange(ABC):
    """
    One call and the forms of its reply. Heartbeats may open a stream before there is a reply, and parts of it may come.

    Attributes:
        call: the request.
    """

    call: ModelCall
    _sent: Sent = field(factory=Sent, init=False)

    @abstractmethod
    def write_reply(self, reply: ModelReply) -> JsonDict:
        """Return the body of a plain response."""

    @abstractmethod
    def write_part(self, reply: ModelReply) -> bytes:
        """Return the events of a reply that is being sampled, after those of its earlier parts."""

    @abstractmethod
    def write_events(self, reply: ModelReply) -> bytes:
        """
        Return the events of a whole reply, after those of heartbeats and of its parts.

        Raises:
            ValueError: the reply does not begin with its parts.
        """

    @abstractmethod
    def write_heartbeat(self) -> bytes:
        """Return an event or comment that keeps a waiting client from giving up."""

    @abstractmethod
    def write_failure(self, error: CallRefusedError) -> bytes:
        """Return the event that tells of a failure in mid-stream."""


def write_event(data: Mapping[str, object], name: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode("ascii") + b"\n"
    return head + b"data: " + write_json(data) + b"\n\n"


def list_parts(reply: ModelReply) -> list[ReplyPart]:
    """Return the parts of a reply in order; a call is at its place in the content, and no text is empty."""
    parts = [ReplyPart("reasoning", reply.reasoning)]
    start = 0
    for call in reply.tool_calls:
        place = len(reply.content) if call.place is None else call.place
        parts += [ReplyPart("content", reply.content[start:place]), ReplyPart("call", call.arguments, call)]
        start = max(start, place)
    parts.append(ReplyPart("content", reply.content[start:]))
    return [part for part in parts if part.text or part.call]


def list_logprobs(reply: ModelReply) -> list[JsonDict]:
    """
    Return the entries of the sampled ids, as OpenAI's dialects write them.

    A log-probability of minus infinity becomes -9999, since JSON has none. The bytes of a token that is a part of a
    character are not known from its text, and are null.
    """
    if not reply.token_texts:
        return []
    values = np.maximum(reply.logprobs, -9999.0).tolist()
    return [
        {"token": text, "logprob": value, "bytes": _bytes_of(text), "top_logprobs": []}
        for text, value in zip(reply.token_texts, values, strict=True)
    ]


def _bytes_of(text: str) -> list[int] | None:
    return None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
