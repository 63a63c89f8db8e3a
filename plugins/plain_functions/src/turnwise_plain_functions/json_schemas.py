"""
JSON schemas of types, as a model reads them.

pydantic makes them. Titles repeat names, and a reference hides a type from the chat templates that print no
definitions, so only types that contain themselves stay definitions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError, core_schema

from turnwise.types import JsonDict

_REFERENCE: Final = "#/$defs/"
_ONE_SCHEMA: Final = ("additionalProperties", "contains", "items", "not", "propertyNames")
_LISTED_SCHEMAS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS: Final = ("patternProperties", "properties")
_ANYTHING: Final = {"items": {}, "additionalProperties": True}
"""Keywords that restrict nothing."""


def json_schema(adapter: TypeAdapter[Any]) -> JsonDict:
    """Return the schema of the JSON values that an adapter accepts, with `$defs` only for recursive types."""
    made = adapter.json_schema(schema_generator=_Generator, union_format="primitive_type_array")
    definitions = made.pop("$defs", {})
    recursive = {name for name in definitions if name in _reachable(name, definitions)}
    inlined = _inlined(made, definitions, recursive)
    kept = {name: _inlined(_untitled(definitions[name]), definitions, recursive) for name in sorted(recursive)}
    return {**_untitled(inlined), "$defs": kept} if kept else _untitled(inlined)


class _Generator(GenerateJsonSchema):
    """The schemas of pydantic in the order of their fields, without what a model cannot use."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - as in its base

    def sort(self, value: JsonDict, parent_key: str | None = None) -> JsonDict:
        return value

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonDict:
        made = super().literal_schema(schema)
        if "const" in made:  # chat templates print `enum`, and few print `const`
            made["enum"] = [made.pop("const")]
        return made

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonDict:
        values = [member.value for member in schema["members"]]
        if any(not isinstance(value, str | int | float | None) for value in values):
            self.handle_invalid_for_json_schema(schema, f"an Enum of other values than texts and numbers: {values}")
        return super().enum_schema(schema)

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonDict:
        number, text = cast("list[JsonDict]", super().decimal_schema(schema)["anyOf"])
        # The pattern says in a hundred characters that the text is a number, which conversion checks as well.
        return self.get_union_of_schemas([number, {key: each for key, each in text.items() if key != "pattern"}])

    def get_union_of_schemas(self, schemas: list[JsonDict]) -> JsonDict:
        made = super().get_union_of_schemas(schemas)
        if isinstance(made.get("type"), list) and len(made["type"]) == 1:
            made["type"] = made["type"][0]
        return made

    def encode_default(self, dft: object) -> Any:
        try:
            encoded = super().encode_default(dft)
            json.dumps(encoded, allow_nan=False)
        except ValueError as error:
            raise PydanticSerializationError(f"{dft!r} is no JSON value") from error
        return encoded


def _untitled(schema: JsonDict) -> JsonDict:
    return {key: each for key, each in schema.items() if key != "title"}


def _inlined(schema: Any, definitions: Mapping[str, Any], recursive: set[str]) -> Any:
    """Replace the references to types that do not contain themselves."""
    if not isinstance(schema, dict):
        return schema
    name = _referred(schema)
    if name and name not in recursive:
        # Keys beside the reference belong to the use of the type, such as its description there.
        rest = {key: each for key, each in schema.items() if key != "$ref"}
        schema = {**_untitled(definitions[name]), **rest}
        return _inlined(schema, definitions, recursive)
    plain = _mapped(schema, lambda each: _inlined(each, definitions, recursive))
    kept = {key: each for key, each in plain.items() if key != "discriminator" and _ANYTHING.get(key, ...) != each}
    return {"type": kept.pop("type"), **kept} if "type" in kept else kept


def _mapped(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> JsonDict:
    """Return a schema with each schema in it changed; other values, such as defaults, stay."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _ONE_SCHEMA:
            changed[key] = change(value)
        elif key in _LISTED_SCHEMAS:
            changed[key] = [change(each) for each in value]
        elif key in _NAMED_SCHEMAS:
            changed[key] = {name: change(each) for name, each in value.items()}
    return changed


def _referred(schema: JsonDict) -> str:
    return cast("str", schema.get("$ref", "")).removeprefix(_REFERENCE)


def _reachable(name: str, definitions: Mapping[str, object]) -> set[str]:
    """Return the definitions that a definition refers to, also through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = {each for each in _references(definitions[waiting.pop()]) if each not in found}
        found |= new
        waiting.extend(new)
    return found


def _references(schema: object) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    if name := _referred(schema):
        yield name
    inner: list[Any] = []
    _mapped(schema, inner.append)
    for each in inner:
        yield from _references(each)
