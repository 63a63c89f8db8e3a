"""Error messages for values that fail validation: one line each, with the path and the expected type."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Literal, TypeGuard, Union, get_args, get_origin

import attrs
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    CattrsError,
    ForbiddenExtraKeysError,
    IterableValidationNote,
)

from turnwise.config.hints import hint_for
from turnwise.config.parts import Choice
from turnwise.config.peer_keys import find_peer_key
from turnwise.errors import ConfigError

_WORDS: Mapping[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Choice: "a name, or a section with 'name' and options",
    Path: "a path",
    type(None): "null",
}
_MAX_SHOWN = 80
MISMATCHES = (ValueError, TypeError, KeyError, OverflowError, CattrsError)


class MismatchAtKeyError(ValueError):
    """A mismatch of one key of the value at hand."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def shown(value: object) -> str:
    """Return a value as an error text shows it: as a config file writes it, and shortened."""
    if value is None or value is True or value is False:
        return "null" if value is None else str(value).lower()
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def mismatch(kind: object, value: object, end: str = "") -> ValueError:
    """Return the error for a value of the wrong type; its text names the expected one."""
    return ValueError(f"expected {_expected(kind)}, got {shown(value)}{end}")


def mismatch_lines(error: BaseException, path: str, kind: object) -> Iterator[str]:
    """Yield one line for each mismatch, in the order of the fields; `path` is the place of the whole value."""
    if isinstance(error, BaseValidationError):
        for each in error.exceptions:
            key, inner = _place(each)
            yield from mismatch_lines(each, _joined(path, key), inner or error.cl)
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(map(str, error.extra_fields)):
            place = _joined(path, key)
            entry = find_peer_key(place)
            yield f"{place}: unknown key{f'; {entry.hint}' if entry else hint_for(key, path, error.cl)}"
    elif isinstance(error, MismatchAtKeyError):
        yield f"{_joined(path, error.key)}: {error}"
    elif isinstance(error, KeyError) and error.args == (path.rpartition(".")[2],):
        yield f"{path}: missing; expected {_expected(kind)}"
    else:
        yield _line(str(error.args[0]) if error.args else type(error).__name__, path, kind)


def dotted(path: str, text: str) -> str:
    """Put a path, where there is one, before a text."""
    return f"{path}: {text}" if path else text


@contextmanager
def located(source: str) -> Iterator[None]:
    """Start each line of a `ConfigError` with the name of the file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from error


def is_enum(kind: object) -> TypeGuard[type[Enum]]:
    """Return whether it is an enum class."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def is_literal(kind: object) -> bool:
    """Return whether it is a `Literal`."""
    return get_origin(kind) is Literal


def is_list(kind: object) -> bool:
    """Return whether a file writes values of this type as a list."""
    origin = get_origin(kind) or kind
    return origin in (list, tuple, set, frozenset, Sequence, AbstractSet)


def _expected(kind: object) -> str:
    if is_enum(kind):
        return f"one of {', '.join(map(str, (member.value for member in kind)))}"
    if is_literal(kind):
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_expected(member) for member in get_args(kind))
    if is_list(kind):
        return "a list"
    return _WORDS.get(kind, "a section of keys")


def _place(error: BaseException) -> tuple[str, object]:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return note.name, note.type
        if isinstance(note, IterableValidationNote):
            return str(note.index), note.type
    return "", None


def _line(text: str, path: str, kind: object) -> str:
    """Move the quoted name at the start of a validator's text into the path."""
    named = re.match(r"'(\w+)([\w.]*)' (.*)", text, re.DOTALL)
    if named is not None and named[1] == path.rpartition(".")[2]:
        return f"{path}{named[2]}: {named[3]}"
    classes = [each for each in (kind, *get_args(kind)) if isinstance(each, type) and attrs.has(each)]
    if named is not None and any(named[1] in attrs.fields_dict(each) for each in classes):
        return f"{_joined(path, named[1] + named[2])}: {named[3]}"
    return dotted(path, " ".join(text.splitlines()))


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path and key else path or key
