"""Random calls for the checks of tool parsers, and the forms in which clients send them back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

from turnwise.types import ToolSchema

Call = tuple[str, Mapping[str, Any]]

CONTENTS: Final = ("", "Let me see.\n", "Grüße, 世界 🌍 \n", "1 < 2, [1, 2] and {}: fine\n", "   ")
_NAMES: Final = ("add", "get_weather", "file-search", "Tool2", "a", "math.sum_of")
_KEYS: Final = ("a", "b", "query", "file_path", "maxResults", "x1")
_TEXTS: Final = (
    "",
    "plain",
    'quotes " and \' and \\ and \\" and \\n',
    "two\nlines\n\tand a tab",
    "Grüße 世界 🌍 é\u0301 \u200b\u00a0",
    "1",
    "-2.5e3",
    "true",
    "null",
    "{}",
    '{"name": "inner", "arguments": {}}',
    "]}, {",
    "f(x=1), g()",
    " spaces around ",
    "a=1&b=2; c: d, e",
    "x" * 300,
)
_TYPES: Final = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}

ECHOES: Final[dict[str, Callable[[str], str]]] = {
    "compact": lambda text: json.dumps(json.loads(text), separators=(",", ":")),
    "indented": lambda text: json.dumps(json.loads(text), indent=2, ensure_ascii=False),
    "sorted": lambda text: json.dumps(json.loads(text), sort_keys=True),
    "escaped": lambda text: json.dumps(json.loads(text), ensure_ascii=True),
    "in white space": lambda text: f" \n{text}\n ",
}
"""The ways in which clients write the arguments of a call again, as functions of their JSON."""


def random_calls(seed: int, *, typed: bool, quoted: str = "") -> list[Call]:
    """
    Return one to three calls, the same for each seed.

    Args:
        seed: of the choice.
        typed: arguments may be any JSON value; else they are texts.
        quoted: a further text that arguments may hold, such as a whole call.
    """
    chosen = random.Random(seed)
    texts = (*_TEXTS, *([quoted, f"see {quoted} there"] if quoted else []))
    names = chosen.sample(_NAMES, chosen.randint(1, 3))
    return [
        (
            name,
            {
                key: _value(chosen, texts, 2) if typed else chosen.choice(texts)
                for key in chosen.sample(_KEYS, chosen.randint(0, 3))
            },
        )
        for name in names
    ]


def random_cuts(num_chars: int, seed: int) -> list[int]:
    """Return places in a text of so many characters, in order and the same for each seed."""
    chosen = random.Random(seed)
    return sorted(chosen.randint(0, num_chars) for _ in range(chosen.randint(0, 9)))


def schemas_of(calls: list[Call]) -> list[ToolSchema]:
    """Return schemas of tools that take the arguments of these calls, and no other types."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A tool.",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": _TYPES[type(value)]} for key, value in arguments.items()},
                },
            },
        }
        for name, arguments in calls
    ]


def _value(chosen: random.Random, texts: tuple[str, ...], depth: int) -> Any:
    kind = chosen.randrange(9 if depth else 7)
    if kind == 7:
        return [_value(chosen, texts, depth - 1) for _ in range(chosen.randint(0, 3))]
    if kind == 8:
        return {key: _value(chosen, texts, depth - 1) for key in chosen.sample(_KEYS, chosen.randint(0, 2))}
    plain = (None, chosen.random() < 0.5, chosen.randint(-(10**12), 10**12), chosen.random() * 1e3)
    return plain[kind] if kind < len(plain) else chosen.choice(texts)
