"""Results of functions: a generator runs to its end, and every value becomes a text that the model reads."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Final

import attrs

from turnwise.errors import ToolError
from turnwise.media import Picture
from turnwise.showing import join_parts
from turnwise.types import JsonDict, ToolResult

MAX_YIELDED: Final = 100_000
"""Most values of a generator; one that never ends would fill the memory before the deadline of its call."""

NO_DEFAULT: Final = object()


@attrs.define(eq=False)
class Yielded:
    """
    Values that a generator yields, in order.

    Attributes:
        given_up: the caller has stopped waiting, so the generator ends; another thread sets it.
    """

    given_up: bool = False
    values: list[object] = attrs.field(factory=list)

    def add(self, value: object) -> None:
        """Keep a value; `ToolError` when it is one too many."""
        if self.given_up:
            raise ToolError("Error: the call was given up")
        if isinstance(value, ToolResult):
            raise TypeError("the function yielded a ToolResult; return it instead")
        if len(self.values) == MAX_YIELDED:
            raise ToolError(f"Error: the function yielded more than {MAX_YIELDED} values")
        self.values.append(value)

    def joined(self) -> object:
        """Return texts and pictures as one result, in their order, and other values as a list."""
        parts = [value for value in self.values if isinstance(value, str | Picture)]
        return join_parts(parts, "") if len(parts) == len(self.values) else self.values


def finish(value: object, yielded: Yielded) -> object:
    """Return the outcome of a call in a thread: awaited, and as the values of its generator."""
    if isinstance(value, Awaitable | AsyncIterator):
        return asyncio.run(finish_on_loop(value, yielded))
    if not isinstance(value, Iterator):
        return value
    with ExitStack() as stack:
        if inspect.isgenerator(value):
            stack.callback(value.close)
        for each in value:
            yielded.add(each)
    return yielded.joined()


async def finish_on_loop(value: object, yielded: Yielded) -> object:
    """Do the same on the event loop, which runs other tasks after each value."""
    if isinstance(value, Awaitable):
        value = await value
    if not isinstance(value, Iterator | AsyncIterator):
        return value
    async with AsyncExitStack() as stack:
        if inspect.isgenerator(value):
            stack.callback(value.close)
        if inspect.isasyncgen(value):
            stack.push_async_callback(value.aclose)
        async for each in value if isinstance(value, AsyncIterator) else _in_turns(value):
            yielded.add(each)
            await asyncio.sleep(0)
    return yielded.joined()


async def _in_turns(values: Iterator[object]) -> AsyncIterator[object]:
    for each in values:
        yield each


def as_result(value: object) -> ToolResult:
    """Convert the outcome of a function to a `ToolResult`; see `tool`."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, list | tuple) and any(isinstance(each, Picture) for each in value):
        return join_parts(each if isinstance(each, Picture) else _write(each) for each in value)
    return join_parts([value if isinstance(value, Picture) else _write(value)])


def _write(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return str.__str__(value)  # the value of an Enum of texts, not its name
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # most results are plain JSON, which needs no pydantic
        plain = _finite(json_form(value, fallback=_text_of))
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _text_of(value: object) -> str:
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        # Its text would be the address of an object.
        raise TypeError(f"the function returned a {type(value).__name__}, expected a value that JSON can carry")
    if isinstance(value, AsyncIterator | Awaitable):
        raise TypeError(f"the function returned a {type(value).__name__} that has not run")
    return str(value)


def json_form(value: object, fallback: Callable[[object], object] | None = None) -> Any:
    """
    Return a value as JSON values: pydantic's form, with the values of a set in a stable order.

    Args:
        value: dataclasses, attrs classes and pydantic models are objects; dates, UUIDs and Decimals are texts; bytes
            are UTF-8 text, or base64 if they are none; NaN and infinities stay.
        fallback: makes a JSON value of any other object; without it, such an object raises a `TypeError`.
    """
    from pydantic_core import PydanticSerializationError, to_jsonable_python  # plain results need no pydantic

    def of_unknown(other: object) -> object:
        if isinstance(other, Picture):
            raise TypeError("a picture has no JSON form: return it alone, or in a list of texts and pictures")
        if attrs.has(type(other)):
            return _fields_of(other)
        if hasattr(other, "tolist"):  # arrays and their numbers
            return other.tolist()
        if isinstance(other, Mapping):
            return dict(other)
        if isinstance(other, Sequence | KeysView | ValuesView | ItemsView):
            return list(other)
        if fallback is None:
            raise TypeError(f"{type(other).__name__} has no JSON form")
        return fallback(other)

    try:
        plain = to_jsonable_python(value, bytes_mode="base64", fallback=of_unknown)
    except PydanticSerializationError as error:
        raise TypeError(" ".join(str(error).split())) from error
    return _stable(value, plain)


def _finite(plain: object) -> Any:
    """Return JSON values with NaN and infinities as texts, because JSON has no such numbers."""
    if isinstance(plain, dict):
        return {key: _finite(each) for key, each in plain.items()}
    if isinstance(plain, list):
        return [_finite(each) for each in plain]
    return str(plain) if isinstance(plain, float) and not math.isfinite(plain) else plain


def _fields_of(value: Any) -> JsonDict:
    # By the names that the schema has, so that a model can give a result back as an argument.
    return {field.alias or field.name: getattr(value, field.name) for field in attrs.fields(type(value))}


def _stable(value: Any, plain: Any) -> Any:
    """Return the JSON form of a value with its sets in order, and its bytes as text where they are text."""
    if isinstance(value, bytes | bytearray):
        return _decoded(value, plain)
    if isinstance(plain, list):
        items = (
            list(value)
            if isinstance(value, set | frozenset | Sequence | KeysView | ValuesView | ItemsView | deque)
            and len(value) == len(plain)
            else plain
        )
        stable = [_stable(*pair) for pair in zip(items, plain, strict=True)]
        return sorted(stable, key=_sort_key) if isinstance(value, set | frozenset) else stable
    if isinstance(plain, dict):
        is_same = isinstance(value, Mapping) and len(value) == len(plain)
        items = (
            list(value.values()) if is_same else [getattr(value, key, getattr(value, f"_{key}", None)) for key in plain]
        )
        return {key: _stable(item, each) for item, (key, each) in zip(items, plain.items(), strict=True)}
    return plain


def _decoded(value: bytes | bytearray, encoded: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return encoded


def _sort_key(value: object) -> tuple[bool, Any, str]:
    """Numbers come first, by size; other values by their text."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0, json.dumps(value, sort_keys=True)


def shown_default(default: object) -> JsonDict:
    """Return `default` as a part of a schema; empty when JSON cannot contain it, such as NaN."""
    if default is NO_DEFAULT:
        return {}
    try:
        plain = json_form(default)
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError):
        return {}
    return {"default": plain}
