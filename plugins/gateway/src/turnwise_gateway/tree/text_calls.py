r"""
Calls that a client sends back as text.

smolagents keeps the text of a turn and writes its calls behind it, as a list in the notation of Python:
``Calling tools:\n[{'id': 'a1', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]``. The results
of the tools follow as a message of the user. Its agents that write code list a call of their interpreter, with a copy
of the code that is in the text.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Final

_MARK: Final = "Calling tools:\n["
_MAX_TEXT: Final = 1 << 20
"""Longer lists are not read: Python's parser needs some hundred times their size."""


def split_calls(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the text before the calls, and the name and the arguments, as JSON, of each; no calls for another text."""
    before, mark, rest = text.rpartition(_MARK)
    if not mark or len(rest) > _MAX_TEXT or (before and not before.endswith("\n")):
        return text, ()
    try:
        listed: object = ast.literal_eval("[" + rest.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text, ()
    calls = tuple(_read_call(each) for each in listed) if isinstance(listed, list) else ()
    found = tuple(call for call in calls if call is not None)
    return (before, found) if found and len(found) == len(calls) else (text, ())


def _read_call(value: object) -> tuple[str, str] | None:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    try:
        return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        return None
