"""The functions of the leaderboard as tool schemas, and what the check needs of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Final

from turnwise.types import JsonDict

_TYPES: Final[Mapping[str, str]] = {
    "array": "array",
    "bool": "boolean",
    "boolean": "boolean",
    "dict": "object",
    "float": "number",
    "integer": "integer",
    "list": "array",
    "number": "number",
    "object": "object",
    "string": "string",
    "tuple": "array",
}
"""JSON types by the leaderboard's; any other one, such as `any`, is a string, as in its own prompts."""
_PYTHON: Final = " Note that the provided function is in Python 3 syntax."
_FLOAT: Final = " This is a float type value."
_RESPONSE: Final = " The response field has the following schema: "
"""Sentences that the leaderboard adds to descriptions. Without them a score would not be comparable."""


def tool_schema(function: JsonDict) -> JsonDict:
    """
    Return a function of the leaderboard as a tool schema in the OpenAI form.

    Names keep their dots, which the leaderboard replaces for some models.
    """
    found: Any = copy.deepcopy(function)
    found["description"] = f"{found.get('description', '')}{_PYTHON}"
    if "response" in found:
        found["description"] += f"{_RESPONSE}{json.dumps(found.pop('response'))}"
    found["parameters"]["type"] = "object"
    for schema in found["parameters"].get("properties", {}).values():
        _translate(schema)
    return {"type": "function", "function": found}


def _translate(schema: Any, *, is_element: bool = False) -> None:
    given = schema.get("type")
    schema["type"] = _TYPES.get(given, "string")
    if given == "float" and not is_element:
        schema["format"] = "float"
        schema["description"] = f"{schema.get('description', '')}{_FLOAT}"
    for inner in (schema.get("properties") or {}).values():
        _translate(inner)
    if isinstance(schema.get("items"), dict):
        _translate(schema["items"], is_element=True)


def parameter_types(function: JsonDict) -> JsonDict:
    """Return the required parameters of a function, and the leaderboard's type of each and of its elements."""
    parameters: Any = function["parameters"]
    types = {
        name: {"type": schema.get("type", "string"), "elements": (schema.get("items") or {}).get("type")}
        for name, schema in parameters.get("properties", {}).items()
    }
    return {"required": list(parameters.get("required") or []), "types": types}
