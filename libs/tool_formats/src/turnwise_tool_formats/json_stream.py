"""Follows JSON while it is sampled: values, and calls that are JSON objects. Only valid JSON is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Final

from turnwise import ToolCall
from turnwise_strict_json import MalformedError, read_json
from turnwise_tool_formats.following import FollowedCall, Waiting
from turnwise_tool_formats.turn import NEXT_JSON, TurnFollower, with_id

_SPACE: Final = re.compile(r"[ \t\n\r]*+")
_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+', re.ASCII)
_CUT_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR: Final = re.compile(r"[-+.0-9a-zA-Z]*+")
_NUMBER_OR_WORD: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_PLAIN_CALL: Final = re.compile(r'\{\s*+"name"\s*+:\s*+"[^"\\]*+"\s*+,\s*+"(\w+)"\s*+:\s*+(?=\{)')
"""How a call begins that has its name before its arguments, and no id between them."""
_CLOSING: Final = {"{": "}", "[": "]"}
Note = Callable[[int], object]
"""Gets the index up to which a value is valid so far; never that after its last bracket."""


def skip_json_space(follower: TurnFollower, at: int) -> Waiting[int]:
    """Return the index of the next character that is not white space in JSON."""
    while True:
        if follower.text[at : at + 1] in " \t\n\r":
            space = _SPACE.match(follower.text, at)
            at = space.end() if space else at
        if at < len(follower.text):
            return at
        yield


def follow_json(follower: TurnFollower, at: int, note: Note = lambda _stop: None) -> Waiting[int]:
    """Return the index after the JSON value at an index; `MalformedError` at its first mistake."""
    open_brackets: list[str] = []
    at = yield from skip_json_space(follower, at)
    if follower.is_whole and (stop := _skip_whole(follower.text, at)) >= 0:
        note(stop - 1)
        return stop
    while True:
        at = yield from _follow_value_start(follower, at, open_brackets, note)
        while open_brackets:  # behind a value, or behind an opening bracket of an empty one
            at = yield from skip_json_space(follower, at)
            char = follower.text[at]
            if char != _CLOSING[open_brackets[-1]]:
                break
            open_brackets.pop()
            at += 1
            if open_brackets:
                note(at)
        if not open_brackets:
            return at
        at = yield from _follow_separator(follower, at, open_brackets[-1], note)


def _skip_whole(text: str, at: int) -> int:
    """Return the index after an object or array; -1 for another value, or one with a mistake."""
    # The scanner in C, which only tells of a whole value.
    if text[at] not in _CLOSING:
        return -1
    try:
        return read_json(text, at)[1]
    except MalformedError:
        return -1


def _follow_value_start(follower: TurnFollower, at: int, open_brackets: list[str], note: Note) -> Waiting[int]:
    """Return the index after a scalar, or of the closing bracket of an empty object or array."""
    while True:
        char = follower.text[at]
        if char == '"':
            return (yield from follow_string(follower, at, note if open_brackets else lambda _stop: None))
        if char not in _CLOSING:
            return (yield from _follow_scalar(follower, at))
        open_brackets.append(char)
        note(at + 1)
        at = yield from skip_json_space(follower, at + 1)
        if follower.text[at] == _CLOSING[char]:
            return at
        if char == "{":
            at = yield from _follow_key(follower, at, note)


def _follow_separator(follower: TurnFollower, at: int, bracket: str, note: Note) -> Waiting[int]:
    """Return the index of the next value, which is behind a comma and perhaps a key."""
    if follower.text[at] != ",":
        raise MalformedError("expected ','")
    note(at + 1)
    at = yield from skip_json_space(follower, at + 1)
    return (yield from _follow_key(follower, at, note)) if bracket == "{" else at


def _follow_key(follower: TurnFollower, at: int, note: Note) -> Waiting[int]:
    """Return the index of the value of a key."""
    at = yield from follow_string(follower, at, note)
    at = yield from skip_json_space(follower, at)
    if follower.text[at] != ":":
        raise MalformedError("expected ':'")
    note(at + 1)
    return (yield from skip_json_space(follower, at + 1))


def follow_string(follower: TurnFollower, at: int, note: Note = lambda _stop: None) -> Waiting[int]:
    """Return the index after a string."""
    if follower.text[at] != '"':
        raise MalformedError("expected a string")
    at += 1
    while True:
        inside = _IN_STRING.match(follower.text, at)
        at = inside.end() if inside else at
        if follower.text[at : at + 1] == '"':
            note(at + 1)
            return at + 1
        note(at)
        if at < len(follower.text) and not _CUT_ESCAPE.match(follower.text, at):
            raise MalformedError("a string has a character that must be escaped, or an escape that is none")
        yield


def _follow_scalar(follower: TurnFollower, at: int) -> Waiting[int]:
    while True:
        found = _SCALAR.match(follower.text, at)
        stop = found.end() if found else at
        if stop < len(follower.text) or stop - at > 5000:  # more digits than Python reads
            break
        yield
    if not _NUMBER_OR_WORD.fullmatch(follower.text, at, stop):
        raise MalformedError("expected a value")
    return stop


def find_arguments(written: str, keys: tuple[str, ...]) -> str | None:
    """
    Return the arguments of a good call as they are written.

    Args:
        written: the JSON object that is the call.
        keys: of the arguments.

    Returns:
        The text of their object, as `follow_json_call` finds it. None if the call has more than a name and an object of
        arguments, in this order: such a call has to be followed.
    """
    begin = _PLAIN_CALL.match(written)
    if begin is None or begin[1] not in keys:
        return None
    stop = read_json(written, begin.end())[1]
    return written[begin.end() : stop] if written[stop:].strip() == "}" else None


def follow_arguments(follower: TurnFollower, call: FollowedCall, at: int) -> Waiting[int]:
    """Follow the JSON object that is the arguments of a call; return the index after it."""
    at = yield from skip_json_space(follower, at)
    if follower.text[at] != "{":
        raise MalformedError("the arguments are no object")
    call.taken = at
    stop = yield from follow_json(follower, at, lambda stop: call.add(follower.text[call.taken : stop], stop))
    call.held = follower.text[call.taken : stop]
    return stop


def follow_json_call(
    follower: TurnFollower, at: int, keys: tuple[str, ...], *, needs_arguments: bool = False, waits_for_id: bool = False
) -> Waiting[tuple[FollowedCall, int]]:
    """
    Follow a call that is a JSON object with a name and arguments, without completing it.

    Args:
        follower: of the turn.
        at: index of the object, perhaps after white space.
        keys: of the arguments.
        needs_arguments: an object without arguments may be no call.
        waits_for_id: the id comes behind the arguments, so the call is shown when it is complete.

    Returns:
        call: without a mistake; its arguments have ended.
        stop: index after the object.
    """
    start = at = yield from skip_json_space(follower, at)
    if follower.text[start] != "{":
        raise MalformedError("expected an object")
    members: dict[str, str] = {}
    streams = () if waits_for_id else keys
    call: FollowedCall | None = None
    while follower.text[at] != "}":
        key, at = yield from _follow_member_key(follower, at, is_first=at == start)
        if not key:
            break
        if key in streams and call is None and "name" in members and follower.text[at] == "{":
            call = follower.begin(_load_text(members["name"]), at, read_id(members.get("id")))
            at = yield from follow_arguments(follower, call, at)
        else:
            value, at = at, (yield from follow_json(follower, at))
            members[key] = follower.text[value:at]
        at = yield from skip_json_space(follower, at)
    follower.check(lambda turn: turn.read_call(start)[0])
    if needs_arguments and call is None and not members.keys() & set(keys):
        raise MalformedError("the arguments are missing")
    return call or _begin_late(follower, start, members, keys), at + 1


def _follow_member_key(follower: TurnFollower, at: int, *, is_first: bool) -> Waiting[tuple[str, int]]:
    """Return the next key of an object and the index of its value; an empty key and the end of an empty object."""
    if not is_first and follower.text[at] != ",":
        raise MalformedError("expected ','")
    at = yield from skip_json_space(follower, at + 1)
    if is_first and follower.text[at] == "}":
        return "", at
    stop = yield from follow_string(follower, at)
    key = _load_text(follower.text[at:stop])
    at = yield from skip_json_space(follower, stop)
    if follower.text[at] != ":":
        raise MalformedError("expected ':'")
    return key, (yield from skip_json_space(follower, at + 1))


def _begin_late(follower: TurnFollower, start: int, members: dict[str, str], keys: tuple[str, ...]) -> FollowedCall:
    """Begin a call whose name is not before its arguments, or whose arguments are missing or a string with JSON."""
    call = follower.begin(_load_text(members["name"]), start, read_id(members.get("id")))
    written = next((members[key] for key in keys if key in members), "{}")
    call.held = _load_text(written) if written.startswith('"') else written
    return call


def read_id(written: str | None) -> str | None:
    """Return the id that the JSON of a value is; None for no id."""
    return None if written is None else with_id(ToolCall(), json.loads(written)).id


def _load_text(written: str) -> str:
    value = json.loads(written)
    if not isinstance(value, str):
        raise MalformedError("expected a string")
    return value


def follow_json_calls(
    follower: TurnFollower, at: int, keys: tuple[str, ...], *, needs_arguments: bool = False, waits_for_id: bool = False
) -> Waiting[int]:
    """Follow and complete the calls that `read_json_calls` reads; return the index after them."""
    follow = partial(follow_json_call, follower, keys=keys, needs_arguments=needs_arguments, waits_for_id=waits_for_id)
    while True:
        start = yield from follower.skip_space(at)
        if follower.text[start] == "[":
            stop = yield from follow_list(follower, start + 1, follow)
        else:
            call, stop = yield from follow(at)
            call.complete()
        joined = yield from follower.joins(NEXT_JSON, stop)
        if joined is None:
            return stop
        at = joined.end()


def follow_list(
    follower: TurnFollower, at: int, follow_item: Callable[[int], Waiting[tuple[FollowedCall, int]]]
) -> Waiting[int]:
    """Follow and complete calls in square brackets, as `read_list` reads them; return the index after the last one."""
    while True:
        at = yield from follower.skip_space(at)
        call, stop = yield from follow_item(at)
        call.complete()
        tag, at = yield from follower.skip_tag(("]", ","), stop)
        if tag == "]":
            return at
        if not tag:
            raise MalformedError("expected ',' or ']'")
