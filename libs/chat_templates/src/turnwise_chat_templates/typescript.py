"""
Schemas of tools as a namespace of TypeScript, as the chat template of gpt-oss writes them.

The texts are the template's to the byte, odd line breaks of nested types included: the model knows these. The template
fails for a tool without a description and for a default of an enum that is no text; here the first has no comment, and
the second is written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turnwise.errors import TemplateError
from turnwise.types import ToolSchema

_PLAIN: Final = {"number": "number", "integer": "number", "boolean": "boolean"}
_LONGEST_ITEM: Final = 50
"""Characters of the longest type that is shown as the one of an array's items."""
_BEFORE_PROPERTY: Final = "\n" + " " * 16
_BEFORE_DEFAULT: Final = " " * 20


def write_namespace(name: str, tools: Sequence[ToolSchema]) -> str:
    """Return the section of a namespace; `TemplateError` for a schema that cannot be shown, with its index."""
    types = []
    for index, tool in enumerate(tools):
        try:
            types.append(_write_tool(tool["function"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TemplateError(f"tools[{index}]: the schema cannot be shown: {error!r}") from error
    return f"## {name}\n\nnamespace {name} {{\n\n{''.join(types)}}} // namespace {name}"


def _write_tool(function: Mapping[str, Any]) -> str:
    comment = "// \n" if function.get("description") == "" else _comment(function, "\n")
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties")
    if not properties:
        return f"{comment}type {function['name']} = () => any;\n\n"
    required = parameters.get("required") or []
    fields = [_write_parameter(name, spec, required) for name, spec in properties.items()]
    return f"{comment}type {function['name']} = (_: {{\n{''.join(fields)}}}) => any;\n\n"


def _write_parameter(name: str, spec: object, required: Sequence[str]) -> str:
    return f"{_comment(spec, chr(10))}{_key(name, required)}{write_type(spec)}{_write_default(spec)},\n"


def _write_default(spec: object) -> str:
    if not _has_default(spec):
        return ""
    value = _get(spec, "default")
    union = not _get(spec, "enum") and bool(_get(spec, "oneOf"))
    bare = isinstance(value, str) and bool(_get(spec, "enum") or union)
    return f"{'' if union else ', '}// default: {value if bare else _to_json(value)}"


def write_type(spec: object) -> str:
    """Return the type of a JSON schema."""
    kind = _get(spec, "type")
    if kind == "array":
        return _write_array(spec)
    if isinstance(kind, list | tuple) and kind:
        return " | ".join(map(str, kind))
    if variants := _get(spec, "oneOf"):
        return " | \n".join(map(_write_variant, variants))
    if kind == "string":
        return _write_string(spec)
    if kind == "object":
        return _write_object(spec)
    return _PLAIN.get(kind, "any") if isinstance(kind, str) else "any"


def _write_array(spec: object) -> str:
    items = _get(spec, "items")
    kind = _get(items, "type")
    if kind == "string":
        item = "string"
    else:
        item = write_type(items) if items else "any"
        item = "any" if item == "object | object" or len(item) > _LONGEST_ITEM else item
    return f"{item}[]{_null(spec)}"


def _write_string(spec: object) -> str:
    if values := _get(spec, "enum"):
        return " | ".join(f'"{value}"' for value in values)
    return f"string{_null(spec)}"


def _write_object(spec: object) -> str:
    properties = _get(spec, "properties")
    if not properties:
        return "object"
    required = _get(spec, "required") or []
    fields = [f"{_key(name, required)}{_BEFORE_PROPERTY}{write_type(inner)}" for name, inner in properties.items()]
    return f"{{\n{', '.join(fields)}}}"


def _write_variant(spec: object) -> str:
    default = f"{_BEFORE_DEFAULT}// default: {_to_json(_get(spec, 'default'))}" if _has_default(spec) else ""
    return f"{write_type(spec)}{_comment(spec, '')}{default}"


def _key(name: str, required: Sequence[str]) -> str:
    return f"{name}: " if name in required else f"{name}?: "


def _comment(spec: object, end: str) -> str:
    description = _get(spec, "description")
    if description and not isinstance(description, str):
        raise TypeError(f"the description is no text: {description!r}")
    return f"// {description}{end}" if description else ""


def _null(spec: object) -> str:
    return " | null" if _get(spec, "nullable") else ""


def _get(spec: object, key: str) -> Any:
    """Return a value of a schema; None for a schema without it, such as `true`."""
    return spec.get(key) if isinstance(spec, Mapping) else None


def _has_default(spec: object) -> bool:
    return isinstance(spec, Mapping) and "default" in spec


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
