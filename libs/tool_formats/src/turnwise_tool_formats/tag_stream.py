"""Follows arguments between tags, and writes them as JSON while they are sampled."""

from __future__ import annotations

import re

from attrs import frozen

from turnwise_strict_json import MalformedError
from turnwise_tool_formats.following import FollowedCall, Waiting
from turnwise_tool_formats.turn import TurnFollower, dump_json


@frozen
class TaggedArguments:
    """
    The form of arguments between tags.

    Attributes:
        key: matches up to the start of a value; its first group is the name of the argument.
        end: matches at the end of a value.
        value_close: the match of `end` that ends a good value.
        close: tag after the last argument.
        trims: a line break at the start of a value and one at its end are no part of it.
    """

    key: re.Pattern[str]
    end: re.Pattern[str]
    value_close: str
    close: str
    trims: bool = False

    def follow(self, follower: TurnFollower, call: FollowedCall, at: int) -> Waiting[int]:
        """Follow the arguments of a call from an index; return the index after the tag that ends them."""
        call.add("{", at)
        keys: set[str] = set()
        while (found := (yield from follower.joins(self.key, at))) is not None:
            name = found[1].strip()
            if name in keys:
                raise MalformedError(f"the argument {name!r} is given twice")
            call.add(f"{', ' if keys else ''}{dump_json(name)}: ", found.end())
            keys.add(name)
            at = yield from self._follow_value(follower, call, name, found.end())
        stop = yield from follower.require_tag(self.close, at)
        call.held = "}"
        return stop

    def _follow_value(self, follower: TurnFollower, call: FollowedCall, name: str, start: int) -> Waiting[int]:
        turn = follower.build_turn("")  # for the types of the arguments
        if turn.types.is_text(call.name, name):
            return (yield from self._follow_text(follower, call, start))
        end = yield from follower.search(self.end, start)
        self._check(end)
        value = follower.text[start : end.start()]
        value = value.removeprefix("\n").removesuffix("\n") if self.trims else value
        call.add(turn.types.write_json(call.name, name, value, turn.max_depth), end.end())
        return end.end()

    def _follow_text(self, follower: TurnFollower, call: FollowedCall, start: int) -> Waiting[int]:
        call.add('"', start)

        def note(stop: int) -> None:
            text = follower.text[call.taken : stop]
            if self.trims and call.taken == start and text.startswith("\n"):
                call.add("", start + 1)
                text = text[1:]
            if self.trims and text.endswith("\n"):  # it may be the last one
                text = text[:-1]
            if text:
                call.add(dump_json(text)[1:-1], call.taken + len(text))

        end = yield from follower.search(self.end, start, note)
        self._check(end)
        call.add('"', end.end())
        return end.end()

    def _check(self, end: re.Match[str]) -> None:
        if end.group() != self.value_close:
            raise MalformedError("a value has no end")
