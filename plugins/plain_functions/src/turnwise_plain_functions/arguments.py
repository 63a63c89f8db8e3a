"""The arguments of a function: a JSON schema for the model, and values of the annotated types for the function."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from turnwise.errors import ToolError
from turnwise.types import JsonDict, JsonObject
from turnwise_plain_functions.json_schemas import json_schema
from turnwise_plain_functions.records import typed_dict

_MAX_COMPLAINTS: Final = 5
_MAX_COMPLAINT_CHARS: Final = 300


class Arguments:
    """
    The arguments of a tool.

    Args:
        tool: name of the tool, for errors.
        types: by parameter, as `readable` returns them; `NotRequired` for one that may be absent.
    """

    def __init__(self, tool: str, types: Mapping[str, object]) -> None:
        self._tool = tool
        self._types = types

    def __reduce__(self) -> tuple[type[Arguments], tuple[str, Mapping[str, object]]]:
        """Pickle the types: another process builds its adapter, which is made of functions, itself."""
        return type(self), (self._tool, self._types)

    @cached_property
    def _adapter(self) -> TypeAdapter[JsonDict]:
        return TypeAdapter(typed_dict("Arguments", self._types))

    def schema(self) -> JsonDict:
        """Return the schema of the arguments, an object."""
        made = {"required": [], **json_schema(self._adapter)}
        first = {key: made[key] for key in ("type", "properties", "required")}
        return {**first, **made}

    def convert(self, arguments: JsonObject) -> JsonDict:
        """Return the values that the function expects; `ToolError` has one line for the model."""
        try:
            # Read as JSON, where a text may be a date and a list a set, even in a strict model.
            return self._adapter.validate_json(json.dumps(arguments))
        except ValidationError as error:
            complaints = dict.fromkeys(_complaints(error, arguments))
            text = "; ".join([*complaints][:_MAX_COMPLAINTS])
            raise ToolError(f"Error: the arguments of {self._tool!r} do not fit: {text}") from error


def _complaints(error: ValidationError, arguments: JsonObject) -> Iterator[str]:
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        place = _place(detail, arguments)
        yield f"{place}: {_expectation(detail)}" if place else _expectation(detail)


def _expectation(detail: ErrorDetails) -> str:
    text = " ".join(detail["msg"].split()).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = (
        text.replace("Input should be in", "expected", 1)
        .replace("Input should be", "expected", 1)
        .replace("Field required", "a value is required", 1)
    )
    return text if len(text) <= _MAX_COMPLAINT_CHARS else f"{text[:_MAX_COMPLAINT_CHARS]}..."


def _place(detail: ErrorDetails, arguments: object) -> str:
    """Return the path of a value, such as ``items[2].price``, without the names of types that pydantic puts there."""
    place, value, parts = "", arguments, detail["loc"]
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if isinstance(value, list) and isinstance(part, int) and (part < len(value) or is_last):
            place += f"[{part}]"
            value = value[part] if part < len(value) else None
        elif isinstance(value, Mapping) and (part in value or (is_last and detail["type"] == "missing")):
            place += f".{part}"
            value = value.get(part)
    return place.removeprefix(".")
