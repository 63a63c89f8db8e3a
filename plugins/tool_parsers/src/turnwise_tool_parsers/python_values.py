"""
Reads calls in Python's syntax, ``name(key=value, ...)``, whose values are literals that JSON can express.

The module does not use `ast`: the end of the text may be cut, the reader has to know where a call ends, and the cost
has to be linear in the text. Beyond Python's syntax it reads JSON's ``true``, ``false`` and ``null``, and line breaks
in strings, because Llama's own template writes them so.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any, Final

from turnwise_strict_json import MalformedError, read_float

_TOKEN: Final = re.compile(
    r"""\s*+(?:
    (?P<string>\"\"\"(?:[^"\\]|\\.|"(?!""))*+\"\"\"|'''(?:[^'\\]|\\.|'(?!''))*+'''
        |"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')
    |(?P<number>[-+]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?)
    |(?P<name>[^\W\d][\w.\-]*+)
    |(?P<mark>[\[\](){}:=,])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|N\{([^}]*+)\}|(.))", re.DOTALL
)
_CUT: Final = re.compile(r"\s*+(?:\Z|[\"'])")
"""Before the end, or before the quotes of a text that does not end."""
_LEADING_ZEROS: Final = re.compile(r"[-+]?0\d*+")
_CHARACTERS: Final = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_WORDS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_MAX_DEPTH: Final = 200


def read_python_call(text: str, start: int) -> tuple[tuple[str, dict[str, Any]], int]:
    """
    Read the call that starts at `start` or after white space.

    Returns:
        call: its name and its arguments.
        stop: index after its closing bracket.

    Raises:
        MalformedError: there is no call; positions in the error count from `start`.
    """
    reader = _Reader(text, start)
    name = reader.take("name", "the name of a tool")
    reader.take("mark", "'('", "(")
    arguments: dict[str, object] = {}
    while not reader.skip(")"):
        if arguments:
            reader.take("mark", "',' or ')'", ",")
            if reader.skip(")"):
                break
        key = reader.take("name", "the name of an argument")
        reader.take("mark", "'=' after the name of an argument", "=")
        if key in arguments:
            raise MalformedError(f"the argument {key!r} is given twice")
        arguments[key] = reader.read_value(1)
    return (name, arguments), reader.at


def read_python_value(text: str, start: int) -> tuple[Any, int]:
    """Read the value that starts at `start` or after white space; return it and the index after it."""
    reader = _Reader(text, start)
    return reader.read_value(1), reader.at


def read_python_text(inside: str) -> str:
    """Return the text that characters between quotes mean; `MalformedError` for a bad escape."""
    return _unquote(f'"{inside}"')


class _Reader:
    """Reads tokens from `at` on, one after the other."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.start = start
        self.at = start

    def peek(self) -> re.Match[str] | None:
        return _TOKEN.match(self.text, self.at)

    def skip(self, mark: str) -> bool:
        """Skip the mark if it comes next."""
        token = self.peek()
        if token is None or token["mark"] != mark:
            return False
        self.at = token.end()
        return True

    def take(self, kind: str, expected: str, mark: str = "") -> str:
        token = self.peek()
        if token is None or token.lastgroup != kind or (mark and token[kind] != mark):
            raise self.expected(expected)
        self.at = token.end()
        return token[kind]

    def expected(self, what: str) -> MalformedError:
        """Return the error that something else comes next; its position is the end of the text if this cuts a token."""
        text = f"it is not a Python call: expected {what} at character {self.at - self.start}"
        is_cut = _CUT.match(self.text, self.at) is not None and self.peek() is None
        return MalformedError(text, position=len(self.text) if is_cut else self.at)

    def read_value(self, depth: int) -> Any:
        token = self.peek()
        if token is None:
            raise self.expected("a value")
        if depth > _MAX_DEPTH:
            raise MalformedError("its values are nested too deeply")
        self.at = token.end()
        if token["string"] is not None:
            return _unquote(token["string"])
        if token["number"] is not None:
            return _read_number(token["number"])
        if token["name"] is not None:
            return _read_word(token["name"])
        if token["mark"] == "{":
            return self._read_dict(depth)
        if token["mark"] == "[":
            return self._read_items("]", depth)[0]
        if token["mark"] == "(":
            items, has_comma = self._read_items(")", depth)
            return items if has_comma or not items else items[0]
        raise MalformedError(f"it is not a Python call: expected a value, got {token['mark']!r}")

    def _read_items(self, close: str, depth: int) -> tuple[list[Any], bool]:
        """Return the values up to a bracket, and whether there is a comma: without one, round brackets only group."""
        items: list[Any] = []
        has_comma = False
        while not self.skip(close):
            if items:
                self.take("mark", f"',' or {close!r}", ",")
                has_comma = True
                if self.skip(close):
                    break
            items.append(self.read_value(depth + 1))
        return items, has_comma

    def _read_dict(self, depth: int) -> dict[str, Any]:
        found: dict[str, object] = {}
        while not self.skip("}"):
            if found:
                self.take("mark", "',' or '}'", ",")
                if self.skip("}"):
                    break
            key = _unquote(self.take("string", "a key in quotes"))
            self.take("mark", "':'", ":")
            if key in found:
                raise MalformedError(f"the key {key!r} is given twice")
            found[key] = self.read_value(depth + 1)
        return found


def _unquote(token: str) -> str:
    body = token[3:-3] if len(token) >= 6 and token[:3] in ('"""', "'''") else token[1:-1]
    if "\\" not in body:
        return body
    text = _ESCAPE.sub(_unescape, body)
    try:  # two escapes of a surrogate pair are one character, as in JSON
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise MalformedError("it holds half of a surrogate pair, which is no character") from error


def _unescape(escape: re.Match[str]) -> str:
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if escape[group] is not None:
            code = int(escape[group], base)
            if code > 0x10FFFF:
                raise MalformedError(f"{escape.group()} is no character")
            return chr(code)
    if escape[5] is not None:
        return _find_character(escape[5], escape.group())
    if escape[6] in "xuUN":
        raise MalformedError(f"{escape.group()} starts no complete escape")
    return _CHARACTERS.get(escape[6], escape.group())


def _find_character(name: str, escape: str) -> str:
    try:
        found = unicodedata.lookup(name)
    except KeyError:
        found = ""
    if len(found) != 1:  # some names are those of several characters, which Python does not allow in texts
        raise MalformedError(f"{escape} is no character")
    return found


def _read_number(token: str) -> int | float:
    if _LEADING_ZEROS.fullmatch(token) and token.strip("-+0"):
        raise MalformedError(f"{token} is no number: write texts in quotes")
    try:
        return read_float(token) if set(token) & set(".eE") else int(token)
    except MalformedError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise MalformedError(f"it holds a number that cannot be read: {error}") from error


def _read_word(word: str) -> bool | None:
    if word not in _WORDS:
        raise MalformedError(f"{word} is not a value: write texts in quotes")
    return _WORDS[word]
