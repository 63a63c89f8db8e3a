"""A request that was understood, and the ways to write its reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from attrs import define, evolve, frozen

from turnwise.types import JsonDict
from turnwise_gateway.calls import CallRefusedError, Dialect, ModelCall, ModelReply
from turnwise_gateway.dialects.strict_json import digest_body, read_json, write_json

_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})


@frozen
class Received:
    """
    A request as it came.

    Attributes:
        body: parsed.
        headers: names in lower case, without keys.
    """

    body: dict[str, Any]
    headers: Mapping[str, str]

    @classmethod
    def read(cls, body: bytes, headers: Mapping[str, str]) -> Received:
        """Parse a body; `CallRefusedError` says why it is no strict JSON object."""
        kept = {name.lower(): value for name, value in headers.items()}
        return cls(read_json(body), {name: kept[name] for name in kept.keys() - _SECRET_HEADERS})

    def complete(self, call: ModelCall, ignored: Set[str]) -> ModelCall:
        """Return a call with its digest, its headers, its mark of a retry, and the sorted names of ignored fields."""
        return evolve(
            call,
            digest=digest_body(call.dialect, self.body),
            is_retry=self._is_retry(),
            headers=self.headers,
            ignored=tuple(sorted(ignored)),
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
