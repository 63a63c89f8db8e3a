"""Random JSON schemas of the kinds that agents ask for, for tests of grammars."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

Schema = dict[str, Any]
PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "grün"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
"""An object with a text, a number and a list."""

_WORDS: Final = ("name", "age", "city", "tags", "kind", "left", "right", "note", "score", "id")
_PATTERNS: Final = ("^[a-z]{1,6}$", "^[A-Z][0-9]{2,4}$", "[0-9]+", "^(yes|no|maybe)$", "^\\d{4}-\\d{2}$")
_VALUES: Final = ("red", "grün", 'a "b"', 7, -1.5, True, None, "")
_MAX_DEPTH: Final = 3


def random_schema(seed: int) -> Schema:
    """
    Return a schema of an object, the same for each seed.

    It has nested objects with optional properties, arrays, enums, constants, numbers with bounds, texts with patterns
    or lengths, unions, and references to definitions, which may be recursive.
    """
    return _Schemas(random.Random(seed)).root()


class _Schemas:
    def __init__(self, numbers: random.Random) -> None:
        self._numbers = numbers
        self._names: list[str] = []

    def root(self) -> Schema:
        numbers = self._numbers
        names = [f"part{index}" for index in range(numbers.randrange(3))]
        definitions = {}
        for name in names:
            definitions[name] = self._object(2)
            self._names.append(name)  # a definition may use those before it
        if names and numbers.random() < 0.5:
            # A tree: the reference is optional, so a finite value fits it.
            definitions[names[0]]["properties"]["child"] = {"$ref": f"#/$defs/{names[0]}"}
        schema = self._object(0)
        return {**schema, "$defs": definitions} if definitions else schema

    def _value(self, depth: int) -> Schema:
        numbers = self._numbers
        makers: list[Callable[[int], Schema]] = [self._text, self._number, self._choice, self._plain]
        if depth < _MAX_DEPTH:
            makers += [self._object, self._array, self._union]
        if self._names:
            makers.append(self._reference)
        return numbers.choice(makers)(depth)

    def _object(self, depth: int) -> Schema:
        numbers = self._numbers
        names = numbers.sample(_WORDS, numbers.randrange(1, 5))
        properties = {name: self._value(depth + 1) for name in names}
        schema: Schema = {"type": "object", "properties": properties}
        if required := [name for name in names if numbers.random() < 0.6]:
            schema["required"] = required
        if numbers.random() < 0.7:
            schema["additionalProperties"] = False
        elif numbers.random() < 0.3:
            schema["additionalProperties"] = self._value(_MAX_DEPTH)
        return schema

    def _array(self, depth: int) -> Schema:
        numbers = self._numbers
        schema: Schema = {"type": "array", "items": self._value(depth + 1)}
        if numbers.random() < 0.8:
            schema["maxItems"] = numbers.randrange(1, 4)
        if numbers.random() < 0.4:
            schema["minItems"] = numbers.randrange(schema.get("maxItems", 3) + 1)
        return schema

    def _union(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth + 1) for _ in range(self._numbers.randrange(2, 4))]}

    def _reference(self, _depth: int) -> Schema:
        return {"$ref": f"#/$defs/{self._numbers.choice(self._names)}"}

    def _text(self, _depth: int) -> Schema:
        numbers = self._numbers
        schema: Schema = {"type": "string"}
        kind = numbers.randrange(3)
        if kind == 0:
            schema["pattern"] = numbers.choice(_PATTERNS)
        elif kind == 1:
            schema["maxLength"] = numbers.randrange(1, 12)
            schema["minLength"] = numbers.randrange(schema["maxLength"] + 1)
        return schema

    def _number(self, _depth: int) -> Schema:
        numbers = self._numbers
        schema: Schema = {"type": numbers.choice(["integer", "number"])}
        low = numbers.randrange(-200, 200)
        if numbers.random() < 0.7:
            schema[numbers.choice(["minimum", "exclusiveMinimum"])] = low
        if numbers.random() < 0.7:
            schema[numbers.choice(["maximum", "exclusiveMaximum"])] = low + numbers.randrange(3, 300)
        return schema

    def _choice(self, _depth: int) -> Schema:
        numbers = self._numbers
        if numbers.random() < 0.3:
            return {"const": numbers.choice(_VALUES)}
        return {"enum": numbers.sample(_VALUES, numbers.randrange(1, 4))}

    def _plain(self, _depth: int) -> Schema:
        numbers = self._numbers
        kind: str | list[str] = numbers.choice(["boolean", "null", "string", "integer"])
        return {"type": [kind, "null"] if kind != "null" and numbers.random() < 0.3 else kind}
