"""Follows a call in Python's syntax, and writes its arguments as JSON while they are sampled."""

from __future__ import annotations

import re
from typing import Final

from turnwise import ToolCall
from turnwise_strict_json import MalformedError
from turnwise_tool_formats.following import FollowedCall, Waiting
from turnwise_tool_formats.turn import Turn, TurnFollower, dump_json
from turnwise_tool_parsers.python_values import read_python_call, read_python_text, read_python_value

_HEAD: Final = re.compile(r"\s*+([^\W\d][\w.\-]*+)\s*+\(")
_KEY: Final = re.compile(r"\s*+([^\W\d][\w.\-]*+)\s*+=")
_SCALAR: Final = re.compile(r"[\w.+\-]++")
_PLAIN: Final = {quote: re.compile(rf"[^\\{quote}]++") for quote in "\"'"}
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
_HEX: Final = "[0-9a-fA-F]"
_ESCAPE: Final = re.compile(
    # Two escapes of a surrogate pair are one character.
    rf"\\(?:u[dD][89abAB]{_HEX}{{2}}|U0000[dD][89abAB]{_HEX}{{2}})\\(?:u{_HEX}{{4}}|U{_HEX}{{8}})"
    rf"|\\(?:x{_HEX}{{2}}|u(?![dD][89abAB]){_HEX}{{4}}|U(?!0000[dD][89abAB]){_HEX}{{8}}"
    r"|[0-7]{3}|[0-7]{1,2}(?=[^0-7])|N\{[^}]{1,100}\}|[^xuUN0-7])",
    re.DOTALL,
)


def follow_python_call(follower: TurnFollower, at: int) -> Waiting[tuple[FollowedCall, int]]:
    """Follow a call without completing it; return it, with its arguments held or shown, and the index after it."""
    head = yield from follower.match(_HEAD, at)
    call = follower.begin(head[1], head.end())
    call.add("{", head.end())
    inside, keys = head.end(), set[str]()
    while True:
        tag, inside = yield from follower.skip_tag((")",), inside)
        if tag:
            break
        if keys:
            inside = yield from follower.require_tag(",", inside)
            tag, inside = yield from follower.skip_tag((")",), inside)
            if tag:
                break
        key = yield from follower.match(_KEY, inside)
        call.add(f"{', ' if keys else ''}{dump_json(key[1])}: ", key.end())
        keys.add(key[1])
        inside = yield from _follow_value(follower, call, key.end())
    call.held = "}"

    def read(turn: Turn) -> ToolCall:
        (name, arguments), _stop = turn.read_value(read_python_call, at)
        return turn.build(name, arguments, "")

    follower.check(read)
    return call, inside


def _follow_value(follower: TurnFollower, call: FollowedCall, at: int) -> Waiting[int]:
    start = at = yield from follower.skip_space(at)
    if follower.text[at] in "\"'":
        call.add('"', at)
        stop = yield from _follow_text(follower, at, call)
        call.add('"', stop)
        return stop
    brackets: list[str] = []
    while True:
        at = yield from follower.skip_space(at)
        char = follower.text[at]
        if char in "\"'":
            at = yield from _follow_text(follower, at)
        elif char in _CLOSING:
            brackets.append(_CLOSING[char])
            at += 1
        elif brackets and char == brackets[-1]:
            brackets.pop()
            at += 1
        elif brackets and char in ",:":
            at += 1
        else:
            at = yield from _follow_scalar(follower, at)
        if not brackets:
            break
    value, stop = read_python_value(follower.text, start)
    if stop != at:
        raise MalformedError("expected a value")
    call.add(dump_json(value), stop)
    return stop


def _follow_scalar(follower: TurnFollower, at: int) -> Waiting[int]:
    while True:
        found = _SCALAR.match(follower.text, at)
        if found is None:
            raise MalformedError("expected a value")
        if found.end() < len(follower.text) or found.end() - at > 5000:  # more digits than Python reads
            return found.end()
        yield


def _follow_text(follower: TurnFollower, at: int, call: FollowedCall | None = None) -> Waiting[int]:
    """Return the index after the text in quotes at an index, whose characters are arguments of the call."""
    quote = follower.text[at]
    while follower.text[at : at + 3] in (quote, quote * 2):
        yield
    if follower.text.startswith(quote * 3, at):
        quote *= 3
    at += len(quote)
    while not follower.text.startswith(quote, at):
        rest = follower.text[at : at + len(quote)]
        if not rest or (rest in quote and len(rest) < len(quote)):
            yield  # it may be the quote
            continue
        if rest[0] == quote[0]:
            written, at = rest[0], at + 1
            text = written
        elif rest[0] == "\\":
            found = yield from follower.match(_ESCAPE, at)
            text, at = read_python_text(found.group()), found.end()
        else:
            inside = _PLAIN[quote[0]].match(follower.text, at)
            assert inside is not None, "another character comes next"
            text, at = inside.group(), inside.end()
        if call is not None:
            call.add(dump_json(text)[1:-1], at)
    return at + len(quote)
