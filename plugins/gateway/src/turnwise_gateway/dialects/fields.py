"""
Typed access to the fields of a request; an error names the field by its path, such as `messages[2].content`.

Every field of a request is honoured, refused by name, or counted as ignored. None and a missing field are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from attrs import field, frozen

from turnwise.types import ToolSchema
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects.field_rules import FieldRule

MAX_INTEGER: Final = 2**63 - 1
MAX_TEXTS: Final = 64
"""Most strings of a list such as `stop`: each of them is looked for in every sampled token."""
MAX_NAME_CHARS: Final = 256
"""Longest name of a model, which every part of a stream repeats, and longest string of a list such as `stop`."""


def refuse(param: str, message: str) -> CallRefusedError:
    """Return the error for a field that is wrong."""
    return CallRefusedError("invalid", f"'{param}' {message}", param=param)


def refuse_unsupported(param: str, reason: str) -> CallRefusedError:
    """Return the error for a field that is right and that this server cannot honour."""
    return CallRefusedError("unsupported", f"'{param}' is not supported: {reason}", param=param)


@frozen
class Fields:
    """
    An object of a request.

    Attributes:
        values: as parsed.
        path: of the object in the request; empty for the request itself.
    """

    values: dict[str, Any]
    path: str = ""
    _read: set[str] = field(factory=set, init=False)

    def name(self, key: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str) -> Any:
        """Return any value; the field counts as read."""
        self._read.add(key)
        return self.values.get(key)

    def text(self, key: str) -> str | None:
        """Return a string."""
        value = self.value(key)
        if value is None or isinstance(value, str):
            return value
        raise refuse(self.name(key), "must be a string")

    def required_text(self, key: str) -> str:
        """Return a string that must be there and not be empty."""
        if not (value := self.text(key)):
            raise refuse(self.name(key), "must be a string that is not empty")
        return value

    def short_text(self, key: str) -> str:
        """Return a string of at most `MAX_NAME_CHARS`; an empty one when it is missing."""
        value = self.text(key) or ""
        if len(value) > MAX_NAME_CHARS:
            raise refuse(self.name(key), f"has more than {MAX_NAME_CHARS} characters")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; False when it is missing."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise refuse(self.name(key), "must be true or false")

    def integer(self, key: str, least: int) -> int | None:
        """Return an integer of at least `least`."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_INTEGER:
            raise refuse(self.name(key), f"must be an integer of at least {least}")
        return value

    def number(self, key: str, most: float) -> float | None:
        """Return a number from 0 to `most`."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise refuse(self.name(key), f"must be a number from 0 to {most:g}")
        return float(value)

    def object(self, key: str) -> Fields | None:
        """Return an object."""
        value = self.value(key)
        return None if value is None else as_fields(value, self.name(key))

    def objects(self, key: str, start: int = 0) -> Iterator[Fields]:
        """Yield the objects of a list from a number on; none when it is missing."""
        value = self.value(key)
        if value is None:
            return
        if not isinstance(value, list):
            raise refuse(self.name(key), "must be a list")
        for number, item in enumerate(islice(value, start, None), start):
            yield as_fields(item, f"{self.name(key)}[{number}]")

    def texts(self, key: str, *, may_be_one: bool = False) -> tuple[str, ...]:
        """Return the strings of a list; `may_be_one` takes a single string too."""
        value = self.value(key)
        if value is None:
            return ()
        items = [value] if may_be_one and isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            one = "a string or " if may_be_one else ""
            raise refuse(self.name(key), f"must be {one}a list of strings, none of them empty")
        if len(items) > MAX_TEXTS or any(len(item) > MAX_NAME_CHARS for item in items):
            raise refuse(
                self.name(key), f"has more than {MAX_TEXTS} strings, or one of more than {MAX_NAME_CHARS} characters"
            )
        return tuple(items)

    def refuse_fields(self, rules: Mapping[str, FieldRule]) -> None:
        """Refuse the first field of these rules, by the names of the fields, with a value that is not neutral."""
        for key in sorted(self.values.keys() & rules.keys()):
            if not rules[key].is_neutral(self.value(key)):
                raise refuse_unsupported(self.name(key), rules[key].reason)

    def unread(self) -> tuple[str, ...]:
        """Return the names of the fields with a value that were not read, sorted."""
        return tuple(sorted(self.name(key) for key in self.values.keys() - self._read if self.values[key] is not None))


def as_fields(value: object, path: str) -> Fields:
    """Return an object of a request; an error names its path."""
    if not isinstance(value, dict):
        raise refuse(path, "must be an object")
    return Fields(value, path)


def read_parts(owner: Fields, key: str, kinds: Mapping[str, str], separator: str) -> str:
    """
    Return the text of a field that is a string, or a list of text parts.

    Args:
        owner: the object with the field.
        key: of the field.
        kinds: types of parts that are text, each with the key of its text.
        separator: between two parts.
    """
    if not isinstance(owner.value(key), list):
        return owner.text(key) or ""
    texts = []
    for part in owner.objects(key):
        kind = part.text("type") or "none"
        if kind not in kinds:
            raise refuse_unsupported(part.path, f"it has the type {kind!r}, and the model reads text only")
        texts.append(part.text(kinds[kind]) or "")
    return separator.join(texts)


def refuse_prefill(message: Fields) -> None:
    """Refuse a message of the assistant that the next turn shall continue, as Mistral and Moonshot call it."""
    for key in ("partial", "prefix"):
        if message.flag(key):
            raise refuse_unsupported(message.name(key), "the model begins each turn itself")


def read_requested_sampling(request: Fields, max_temperature: float = 2.0) -> dict[str, float | int]:
    """Return the sampling parameters that a request asks for, by their names in `SamplingParams`."""
    found: dict[str, float | int | None] = {
        "temperature": request.number("temperature", max_temperature),
        "top_p": request.number("top_p", 1.0),
        "top_k": request.integer("top_k", -1),
        "seed": request.integer("seed", -MAX_INTEGER),
    }
    return {name: value for name, value in found.items() if value is not None}


def read_template_options(request: Fields) -> dict[str, Any]:
    """Return the options of the chat template that a request asks for, by their paths."""
    options = request.object("chat_template_kwargs") or Fields({})
    found = {options.name(name): value for name, value in options.values.items() if value is not None}
    if request.value("enable_thinking") is not None:
        found["enable_thinking"] = request.flag("enable_thinking")
    return found


def describe_tool(name: str, description: str | None, parameters: Fields | None) -> ToolSchema:
    """Return the schema of a tool in the form of Chat Completions."""
    function: dict[str, object] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters.values
    return {"type": "function", "function": function}
