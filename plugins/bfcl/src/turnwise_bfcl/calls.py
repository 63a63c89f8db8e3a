"""
Calls of the simulated programs as texts of Python, which the leaderboard's code evaluates.

Only a call of a known function with values of JSON becomes such a text, or passes for one.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Collection, Mapping


def write_call(name: str, arguments: Mapping[str, object]) -> str:
    """
    Return a call as the leaderboard writes it.

    Raises:
        ValueError: an argument has a name that cannot be one in Python, so that the text could be other code.
    """
    for each in arguments:
        if not each.isidentifier() or keyword.iskeyword(each):
            raise ValueError(f"Error during execution: {each!r} is no name of an argument")
    return f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})"


def is_plain_call(text: str, names: Collection[str]) -> bool:
    """Return whether a text is one call of a function in `names` whose arguments are literals."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in names:
            return False
        for value in (*call.args, *(each.value for each in call.keywords)):
            ast.literal_eval(value)
        return all(each.arg for each in call.keywords)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
