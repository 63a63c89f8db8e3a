"""
Parses the body of a request, starting from an earlier body of the same session.

An agent sends its whole conversation with every call, so most of a body has the bytes of the one before. A JSON reader
that has read the same bytes is in the same state. So the fields and items up to the first difference are taken from the
earlier body, and only the rest is parsed, checked and digested. The result is the same as for a whole body.

The fields after the conversation, such as the schemas of tools, are often equal in all sessions. Those with the same
bytes are one object, as long as a session has it.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from attrs import define, field, frozen

from turnwise import Message
from turnwise_gateway.dialects import strict_json
from turnwise_gateway.dialects.pictures import PictureReader
from turnwise_gateway.dialects.response_store import ResponseStore
from turnwise_gateway.limits import CallLimits
from turnwise_strict_json import MAX_DEPTH, check_depth, check_surrogates, read_json

T = TypeVar("T")

_NOT_IN_DIGEST: Final = ("stream", "stream_options")
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_CANONICAL: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_MAX_CONVERSATIONS: Final = 4
_MAX_BYTES: Final = 8 * 1024 * 1024


@frozen(eq=False)
class Mark:
    """The messages after an item: their number, the last one, and the names of ignored fields so far."""

    num_messages: int
    last: Message | None
    ignored: frozenset[str]


@define(eq=False)
class Reading:
    """
    The things that a dialect has read from a body.

    Attributes:
        messages: of all items.
        marks: one for each item.
        derived: by the name of a field, its value and the result of reading it.
    """

    messages: list[Message] = field(factory=list)
    marks: list[Mark] = field(factory=list)
    derived: dict[str, tuple[object, Any]] = field(factory=dict)

    def cut(self, num_items: int) -> Reading:
        """Return the reading of the first items, and of the other fields as far as they stay the same."""
        marks = self.marks[:num_items]
        messages: list[Message] = []
        if marks and (last := marks[-1].last) is not None:
            # A later item can replace the last message, and none before it.
            messages = [*self.messages[: marks[-1].num_messages - 1], last]
        return Reading(messages, marks, dict(self.derived))


@define(eq=False)
class Items:
    """
    The items of a conversation.

    Attributes:
        values: parsed.
        ends: offsets in the body behind each item.
        digests: of the items up to each one.
    """

    values: list[Any] = field(factory=list)
    ends: list[int] = field(factory=list)
    digests: list[bytes] = field(factory=list)

    def add(self, value: object, end: int) -> None:
        before = self.digests[-1] if self.digests else b""
        self.values.append(value)
        self.ends.append(end)
        self.digests.append(hashlib.sha256(before + _CANONICAL.encode(value).encode("ascii")).digest())

    def cut(self, number: int) -> Items:
        return Items(self.values[:number], self.ends[:number], self.digests[:number])


@frozen(eq=False)
class Tail:
    """
    The fields after a conversation, which sessions share.

    Attributes:
        source: the bytes behind the conversation.
        values: the fields; nothing may change them.
        derived: by the name of a field, its value and the result of reading it in the dialect.
    """

    source: bytes = b""
    values: Mapping[str, Any] = field(factory=dict)
    derived: dict[str, tuple[object, Any]] = field(factory=dict)


_TAILS: Final[WeakValueDictionary[tuple[str, bytes], Tail]] = WeakValueDictionary()


@frozen(eq=False)
class RequestBody:
    """
    A parsed body.

    Attributes:
        dialect: name of the dialect.
        list_key: name of the field with the conversation.
        source: the bytes up to the end of the conversation; empty when another body cannot start from this one.
        values: the object. It shares values with other bodies, so nothing may change it.
        reading: filled by the dialect.
        items: of the conversation; None without such a list.
        head: fields before the conversation.
        tail: fields after it.
        rest_digest: of all other fields.
    """

    dialect: str
    list_key: str
    source: bytes
    values: dict[str, Any]
    reading: Reading
    items: Items | None = None
    head: Mapping[str, Any] = field(factory=dict)
    tail: Tail = field(factory=Tail)
    rest_digest: bytes = b""

    @property
    def digest(self) -> str:
        """Digest of the request without its fields about streaming; the order of keys does not count."""
        items = self.items.digests[-1:] if self.items is not None else []
        shape = b"list" if self.items is not None else b"none"
        return hashlib.sha256(b"\n".join([self.dialect.encode(), shape, *items, self.rest_digest])).hexdigest()

    @classmethod
    def read(cls, dialect: str, list_key: str, source: bytes, known: Sequence[RequestBody] = ()) -> RequestBody:
        """
        Parse a body.

        Args:
            dialect: name of the dialect.
            list_key: name of the field with the conversation.
            source: the body.
            known: earlier bodies of the session.

        Raises:
            CallRefusedError: it is no object in strict JSON.
        """
        counts = [(each.count_common_items(dialect, source), each) for each in known]
        num_items, earlier = max(counts, key=lambda count: count[0], default=(0, None))
        try:
            return _read(dialect, list_key, source, earlier if num_items else None, num_items)
        except (ValueError, RecursionError):
            return cls.of(dialect, list_key, strict_json.read_json(source))  # raises the error of the whole body

    @classmethod
    def of(cls, dialect: str, list_key: str, values: dict[str, Any]) -> RequestBody:
        """Return a body that was parsed by other means."""
        items = None
        if isinstance(given := values.get(list_key), list):
            items = Items()
            for value in given:
                items.add(value, 0)
        rest = {name: value for name, value in values.items() if items is None or name != list_key}
        return cls(dialect, list_key, b"", values, Reading(), items, rest_digest=_digest_fields(rest))

    def count_common_items(self, dialect: str, source: bytes) -> int:
        """Return the number of items up to which another body has the bytes of this one."""
        if dialect != self.dialect or not self.source or self.items is None or not self.items.ends:
            return 0
        ends = self.items.ends
        if source.startswith(self.source[: ends[-1]]):
            return len(ends)
        return bisect_left(ends, True, key=lambda end: not source.startswith(self.source[:end]))

    def count_common_bytes(self, dialect: str, source: bytes) -> int:
        """Return the number of bytes up to the end of the last item that another body has as well."""
        number = self.count_common_items(dialect, source)
        return self.items.ends[number - 1] if self.items is not None and number else 0

    def continues(self, other: RequestBody) -> bool:
        """Return whether the body has all items of another one, so that nothing better starts from the other."""
        return other.items is None or other.count_common_items(self.dialect, self.source) == len(other.items.ends)


@define(eq=False)
class RequestMemory:
    """
    The last bodies of a session, one for each of its latest conversations.

    Attributes:
        limits: of its bodies; None for none.
        responses: that its requests may name.
        pictures: reads the pictures of its requests; None if the run takes none.
    """

    limits: CallLimits | None = None
    responses: ResponseStore = field(factory=ResponseStore, init=False)
    pictures: PictureReader | None = field(init=False)
    _bodies: list[RequestBody] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        limits = None if self.limits is None else self.limits.pictures
        self.pictures = None if limits is None else PictureReader(limits.check, limits.hosts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the bodies."""
        return sum(len(body.source) for body in self._bodies)

    def count_new_bytes(self, dialect: str, source: bytes) -> int:
        """Return how many bytes of a body follow the items that an earlier body has as well."""
        return len(source) - max((each.count_common_bytes(dialect, source) for each in self._bodies), default=0)

    def read(self, dialect: str, list_key: str, source: bytes) -> RequestBody:
        """Parse a body; `CallRefusedError` if it is no object in strict JSON, or has too many values."""
        if self.limits is not None:
            self.limits.check_values(source)
        return RequestBody.read(dialect, list_key, source, self._bodies)

    def keep(self, body: RequestBody) -> None:
        """Remember a body that the dialect has read; it replaces the bodies that it continues."""
        if not body.source:
            return
        others = [each for each in self._bodies if not body.continues(each)]
        kept: list[RequestBody] = []
        for each in (body, *others[: _MAX_CONVERSATIONS - 1]):
            if sum(len(other.source) for other in kept) + len(each.source) <= _MAX_BYTES:
                kept.append(each)
        self._bodies = kept  # at once, for a thread may read another body of the session meanwhile


@define
class _Scan:
    """A position in the text of a body, or of its rest after `base` bytes."""

    text: str
    base: int = 0
    position: int = 0
    _num_chars: int = field(default=0, init=False)
    _num_bytes: int = field(default=0, init=False)
    _is_ascii: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._is_ascii = self.text.isascii()

    @classmethod
    def of(cls, source: bytes, base: int = 0) -> _Scan:
        return cls(source[base:].decode("utf-8"), base)

    @property
    def offset(self) -> int:
        """Bytes of the body before the position."""
        if self._is_ascii:
            return self.base + self.position
        self._num_bytes += len(self.text[self._num_chars : self.position].encode("utf-8"))
        self._num_chars = self.position
        return self.base + self._num_bytes

    def peek(self) -> str:
        """Return the next character that is no space; empty at the end."""
        self.position = _skip_space(self.text, self.position)
        return self.text[self.position : self.position + 1]

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"no {character!r} at character {self.position}")
        self.position += 1

    def value(self, depth: int) -> Any:
        """Return the next value, which is nested in `depth` others."""
        self.peek()
        start = self.position
        value, self.position = read_json(self.text, start)
        check_depth(value, MAX_DEPTH - depth, self.text, start, self.position)
        return value


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match is not None else position


def _read(dialect: str, key: str, source: bytes, earlier: RequestBody | None, num_items: int) -> RequestBody:
    """Return a body that has the bytes of another one up to the end of an item; None for one that is read whole."""
    if earlier is not None and earlier.items is not None:
        head, items, reading = earlier.head, earlier.items.cut(num_items), earlier.reading.cut(num_items)
        scan = _Scan.of(source, items.ends[-1])
    else:
        head, items, reading = {}, Items(), Reading()
        scan = _Scan.of(source)
        scan.expect("{")
        if not _read_fields(scan, head, (), key):
            _check_end(scan)
            check_surrogates(head, scan.text)
            return RequestBody(dialect, key, source, head, reading, rest_digest=_digest_fields(head))
        scan.expect("[")
    _read_items(scan, items)
    end = scan.offset
    if earlier is not None and source[end:] == earlier.tail.source:
        tail, digest = earlier.tail, earlier.rest_digest
    else:
        tail = _read_tail(dialect, scan, source[end:], {*head, key})
        digest = _digest_fields({**head, **tail.values})
    check_surrogates([head, items.values[num_items:], tail.values], scan.text)
    values = {**head, key: items.values, **tail.values}
    return RequestBody(dialect, key, source[:end], values, reading, items, head, tail, digest)


def _read_tail(dialect: str, scan: _Scan, source: bytes, others: Collection[str]) -> Tail:
    """Return the fields from the position of a scan to the end of the body; `source` has the same bytes."""
    name = dialect, hashlib.sha256(source).digest()
    known = _TAILS.get(name)
    if known is not None and known.values.keys().isdisjoint(others):
        return known
    values: dict[str, object] = {}
    _read_fields(scan, values, others, None)
    _check_end(scan)
    tail = _TAILS[name] = Tail(source, values)
    return tail


def _read_fields(scan: _Scan, fields: dict[str, Any], others: Collection[str], list_key: str | None) -> bool:
    """
    Read fields up to the end of the body's object, and return False; or up to a list, and return True.

    Args:
        scan: behind the opening brace, or behind a value.
        fields: receives the fields.
        others: names of the fields before.
        list_key: name of the list to stop at.
    """
    while scan.peek() != "}":
        if fields or others:
            scan.expect(",")
        if scan.peek() != '"':
            raise ValueError("a field has no name")
        name = scan.value(1)
        if name in fields or name in others:
            raise ValueError("an object has a key twice")
        scan.expect(":")
        if name == list_key and scan.peek() == "[":
            return True
        fields[name] = scan.value(1)
    scan.expect("}")
    return False


def _read_items(scan: _Scan, items: Items) -> None:
    """Read items up to the end of their list."""
    while scan.peek() != "]":
        if items.values:
            scan.expect(",")
        value = scan.value(2)
        items.add(value, scan.offset)
    scan.expect("]")


def _check_end(scan: _Scan) -> None:
    if scan.peek():
        raise ValueError("there is more after the object")


def _digest_fields(fields: Mapping[str, object]) -> bytes:
    kept = {name: value for name, value in fields.items() if name not in _NOT_IN_DIGEST}
    return hashlib.sha256(_CANONICAL.encode(kept).encode("ascii")).digest()
