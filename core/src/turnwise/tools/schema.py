"""
Tool schemas: OpenAI function schemas, checked and compiled once.

Checking the arguments of a call then costs about a microsecond. This module makes no schema and runs no tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NoReturn

import jsonschema_rs
from attrs import field, frozen

from turnwise.errors import ConfigError
from turnwise.types import JsonObject, ToolSchema

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_COMPLAINTS: Final = 5
_MAX_COMPLAINT_CHARS: Final = 300
_NO_PARAMETERS: Final[JsonObject] = {"type": "object", "properties": {}}
_TYPE_NAMES: Final = "array, boolean, integer, null, number, object or string"


@frozen(eq=False)
class CompiledSchema:
    """A valid tool schema, unchanged, and the name of the tool."""

    name: str
    schema: ToolSchema
    _validator: jsonschema_rs.Validator = field(repr=False)

    def complaint(self, arguments: JsonObject) -> str:
        """Return the mismatch of a call's arguments as a text for the model; empty when they fit."""
        plain = arguments if isinstance(arguments, dict) else dict(arguments)
        try:
            if self._validator.is_valid(plain):
                return ""
            errors = list(islice(self._validator.iter_errors(plain), _MAX_COMPLAINTS))
        except ValueError as error:  # nested too deeply, a lone surrogate, a key that is no string
            return f"they cannot be read as JSON: {_clipped(str(error))}"
        return "; ".join(map(_complaint, errors))


def compile_schema(schema: object, origin: str = "") -> CompiledSchema:
    """
    Check a tool schema in the OpenAI form and make it ready to check arguments.

    A `ConfigError` is one line that names the tool, its source `origin`, and the mismatch.
    """
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or schema.get("type") != "function" or not isinstance(function, Mapping):
        expected = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
        raise ConfigError(
            f"tool {origin or '?'}: its schema must have the form {expected}, got {_clipped(repr(schema))}"
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"tool {origin or '?'}: its name must be 1 to 64 of A-Z a-z 0-9 _ . -, got {name!r}")
    where = f"tool {name!r}" + (f" ({origin})" if origin and origin != repr(name) else "")
    if not isinstance(function.get("description", ""), str):
        raise ConfigError(f"{where}: its description must be a string")
    return CompiledSchema(name, schema, _validator(function.get("parameters", _NO_PARAMETERS), where))


def _validator(parameters: object, where: str) -> jsonschema_rs.Validator:
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ConfigError(f"{where}: its parameters must be a JSON schema with type 'object'")
    try:
        # Values stay out of the texts: a wrong argument may be megabytes.
        return jsonschema_rs.validator_for(dict(parameters), mask="the value", retriever=_refuse_remote)
    except jsonschema_rs.ValidationError as error:
        path = ".".join(["parameters", *map(str, error.instance_path)])
        problem = f"a type is one of {_TYPE_NAMES}" if path.endswith(".type") else _clipped(error.message)
        got = f", got {_clipped(repr(error.instance))}" if error.instance_path else ""
        raise ConfigError(f"{where}: {path}: {problem}{got}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: its parameters are not JSON: {_clipped(str(error))}") from error


def _refuse_remote(uri: str) -> NoReturn:
    raise ValueError(f"a schema may only refer to itself, not to {uri}")


def _complaint(error: jsonschema_rs.ValidationError) -> str:
    """Return a mismatch with its place. When all alternatives fail, it has the reason of each."""
    reasons = list(_reasons(error))
    places = dict.fromkeys(_place(reason.instance_path) for reason in reasons)
    if len(places) == 1:
        text, (place,) = _clipped(" and ".join(dict.fromkeys(reason.message for reason in reasons))), places
        return f"{place}: {text}" if place else text
    # An alternative that is an object may fail deep inside, so each reason says its own place.
    return _clipped(
        " and ".join(f"{_place(each.instance_path)}: {each.message}".removeprefix(": ") for each in reasons)
    )


def _reasons(error: jsonschema_rs.ValidationError) -> Iterator[jsonschema_rs.ValidationError]:
    """Yield the first failure of each alternative, and of the alternatives in it; the error itself if it has none."""
    branches = error.kind.as_dict().get("context") if error.kind.name in ("anyOf", "oneOf") else None
    failures = [branch[0] for branch in branches or () if branch]
    for failure in failures:
        yield from _reasons(failure)
    if not failures:
        yield error


def _place(path: Iterable[str | int]) -> str:
    """Return a path such as ``filters.tags[2]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _clipped(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_COMPLAINT_CHARS else f"{line[:_MAX_COMPLAINT_CHARS]}..."
