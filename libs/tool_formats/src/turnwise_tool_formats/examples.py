"""Makes a call that fits the schema of a tool, as the example in a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from turnwise.types import JsonObject, ToolSchema
from turnwise_tool_formats.schema_values import JSON_TYPES, resolve_reference

_TEXT: Final = "..."
_VALUES: Final[dict[str, Any]] = {"string": _TEXT, "integer": 1, "number": 1, "boolean": True, "null": None}
_MAX_DEPTH: Final = 8


def example_call(tool: ToolSchema) -> tuple[str, JsonObject]:
    """Return the name of a tool and the arguments that it requires, or all of them if it requires none."""
    function = tool.get("function", {})
    parameters = function.get("parameters") or {}
    arguments = _object(parameters, parameters, 0)
    return str(function.get("name", "")), arguments


def schema_of_value(name: str, arguments: Mapping[str, object]) -> ToolSchema:
    """Return the schema of a tool whose arguments have the types of these."""
    properties = {key: {"type": JSON_TYPES[type(value)]} for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def _object(schema: Mapping[str, object], root: Mapping[str, object], depth: int) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    required = schema.get("required")
    names = [name for name in required if name in properties] if isinstance(required, list) else []
    return {name: _value(properties[name], root, depth + 1) for name in names or properties}


def _value(schema: object, root: Mapping[str, object], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _TEXT
    if isinstance(reference := schema.get("$ref"), str):
        return _value(resolve_reference(reference, root), root, depth + 1)
    for key in ("enum", "examples"):
        if isinstance(values := schema.get(key), list) and values:
            return values[0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(key), list) and choices:
            return _value(choices[0], root, depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "array":
        return [_value(schema["items"], root, depth + 1)] if "items" in schema else []
    return _object(schema, root, depth) if kind == "object" else _VALUES.get(str(kind), _TEXT)
