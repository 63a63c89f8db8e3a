"""A request that was understood, and the ways to write its reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import TypeVar

import numpy as np
from attrs import define, evolve, frozen

from turnwise import Message
from turnwise.types import JsonDict
from turnwise_gateway.calls import CallRefusedError, Dialect, ModelCall, ModelReply
from turnwise_gateway.dialects.fields import Fields
from turnwise_gateway.dialects.request_body import Mark, RequestBody
from turnwise_gateway.dialects.strict_json import write_json

T = TypeVar("T")
AddItem = Callable[[list[Message], Fields, set[str]], None]

_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})


@frozen
class Received:
    """
    A request as it came.

    Attributes:
        body: parsed.
        headers: names in lower case, without keys.
        source: the body as it came.
    """

    body: RequestBody
    headers: Mapping[str, str]
    source: bytes

    @classmethod
    def of(cls, body: RequestBody, headers: Mapping[str, str], source: bytes) -> Received:
        """Return a request without the headers that have keys."""
        kept = {name.lower(): value for name, value in headers.items()}
        return cls(body, {name: kept[name] for name in kept.keys() - _SECRET_HEADERS}, source)

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
        """Return a call with digest, headers, body, the mark of a retry, and the sorted names of ignored fields."""
        return evolve(
            call,
            digest=self.body.digest,
            is_retry=self._is_retry(),
            headers=self.headers,
            ignored=tuple(sorted(ignored)),
            body=self.source,
        )

    def _is_retry(self) -> bool:
        count = self.headers.get("x-stainless-retry-count", "0")
        return count.isdecimal() and int(count) > 0


@define
class Exchange(ABC):
    """
    One call and the forms of its reply. A stream may be opened by heartbeats before there is a reply.

    Attributes:
        dialect: of the request.
        call: the request.
    """

    call: ModelCall

    @property
    def dialect(self) -> Dialect:
        """Dialect of the request."""
        return self.call.dialect

    @abstractmethod
    def write_reply(self, reply: ModelReply) -> JsonDict:
        """Return the body of a plain response."""

    @abstractmethod
    def write_events(self, reply: ModelReply) -> bytes:
        """Return the events of a whole reply, after those of heartbeats."""

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


def list_logprobs(reply: ModelReply) -> list[JsonDict]:
    """
    Return the entries of the sampled ids, as OpenAI's dialects write them.

    A log-probability of minus infinity becomes -9999, since JSON has none.
    """
    if not reply.token_texts:
        return []
    values = np.maximum(reply.logprobs, -9999.0).tolist()
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace")), "top_logprobs": []}
        for text, value in zip(reply.token_texts, values, strict=True)
    ]
