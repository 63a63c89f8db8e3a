"""
Turns the text of an argument into a value, by the tool's JSON schema.

In XML formats `5` can be a number or a text. The schema of the tool decides: a text stays a text where the schema
allows nothing else, and is read as JSON where it allows other types. It also stays a text when the tool or the argument
is unknown, when the schema names no type, and when the text is no value of an allowed type: checking arguments against
the schema is the tool's task, and its error tells the model more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from turnwise.types import ToolSchema
from turnwise_strict_json import MalformedError, check_value, load_json

JSON_TYPES: Final = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_MAX_REFERENCES: Final = 8
Schema = Mapping[str, Any]


class ArgumentTypes:
    """
    The types of the arguments of each tool.

    Args:
        schemas: of the run's tools, in the OpenAI form.
    """

    def __init__(self, schemas: Sequence[ToolSchema]) -> None:
        self._schemas: Final = schemas

    @cached_property
    def _parameters(self) -> Mapping[object, Schema]:
        """The parameters of each tool; made at the first question, because most formats write types themselves."""
        functions = [schema.get("function", {}) for schema in self._schemas]
        return {each.get("name"): each.get("parameters") or {} for each in functions}

    @property
    def names(self) -> Collection[object]:
        """Of the tools."""
        return self._parameters.keys()

    def is_text(self, tool: str, argument: str) -> bool:
        """Return whether each text is the value of an argument of a tool, whatever the text is."""
        return not self._find_types(tool, argument) - {"string"}

    def write_json(self, tool: str, argument: str, text: str, max_depth: int) -> str:
        """Return the JSON of the value that a text has, which is the text itself where that is JSON."""
        value = self.convert(tool, argument, text, max_depth)
        written = text.strip()
        # A value of another type has the JSON that the model wrote, unless it wrote a word of Python.
        return json.dumps(value, ensure_ascii=False) if value is text or written in _PYTHON_WORDS else written

    def _find_types(self, tool: str, argument: str) -> set[str]:
        """Return the types that the schema of an argument allows; none if it names none."""
        parameters = self._parameters.get(tool, {})
        schema = parameters.get("properties", {}).get(argument)
        return (_allowed_types(schema, parameters) or set()) if schema is not None else set()

    def convert(self, tool: str, argument: str, text: str, max_depth: int) -> Any:
        """Return the value that a text has as an argument of a tool."""
        types = self._find_types(tool, argument)
        if not types - {"string"}:
            return text
        try:
            value = load_json(_PYTHON_WORDS.get(text.strip(), text))
            check_value(value, text, max_depth)
        except MalformedError:
            return text
        kind = JSON_TYPES[type(value)]
        fits = kind in types or ("number" in types and kind == "integer") or ("integer" in types and kind == "number")
        return value if fits and kind != "string" else text


def _allowed_types(schema: object, root: Schema, references: int = 0) -> set[str] | None:
    """Return the types that a schema allows; None when it names none."""
    if not isinstance(schema, Mapping) or references > _MAX_REFERENCES:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _allowed_types(resolve_reference(reference, root), root, references + 1)
    if "type" in schema:
        return {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    if "const" in schema or "enum" in schema:
        return {JSON_TYPES[type(value)] for value in schema.get("enum", [schema.get("const")])}
    for key in ("anyOf", "oneOf", "allOf"):
        found = [_allowed_types(each, root, references + 1) for each in schema.get(key, ())]
        known = [each for each in found if each is not None]
        if known:
            return set.intersection(*known) if key == "allOf" else set.union(*known)
    return None


def resolve_reference(reference: str, root: Schema) -> Any:
    """Return the part of a schema that `$ref` names; None if it has no such part."""
    found: object = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
