"""Reads a section of calls, each between tags, as DeepSeek and Kimi write it."""

from __future__ import annotations

import re
from abc import abstractmethod
from functools import partial
from typing import ClassVar

from turnwise import ToolCall
from turnwise_strict_json import MalformedError
from turnwise_tool_formats.following import FollowedCall, Waiting
from turnwise_tool_formats.turn import Found, FramedGrammar, Turn, TurnFollower, with_id


class SectionGrammar(FramedGrammar):
    """
    A format with a section of calls; a call outside a section is one, too.

    Attributes:
        section: tags around the section.
        call: tags around a call.
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]
    must_close = True

    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        calls: list[ToolCall] = []
        start = at = opening.end() if opening.group() == self.section[0] else opening.start()
        while (inside := turn.skip(self.call[0], at)) >= 0:
            search_from = inside
            try:
                call, search_from = self.read_head_and_arguments(turn, inside)
                at = turn.skip(self.call[1], search_from)
                if at < 0:
                    raise MalformedError("there is text after its arguments")  # noqa: TRY301 - the tag below ends the call
                calls.append(call)
            except MalformedError as error:
                name, call_id = self.read_name_and_id(turn, inside)
                found, at = turn.refuse_to_next_tag(str(error), inside, search_from, name)
                calls.extend(with_id(call, call_id) for call in found)
        if not calls:
            return turn.refuse_to_next_tag("the section holds no call", start, start)
        return calls, max(turn.skip(self.section[1], at), at)

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        at = opening.end() if opening.group() == self.section[0] else opening.start()
        inside = yield from follower.require_tag(self.call[0], at)
        while True:
            call, stop = yield from self.follow_head_and_arguments(follower, inside)
            stop = yield from follower.require_tag(self.call[1], stop)
            follower.check(partial(self._read_one, start=inside))
            call.complete()
            tag, inside = yield from follower.skip_tag((self.call[0], self.section[1]), stop)
            if tag != self.call[0]:
                return inside

    def _read_one(self, turn: Turn, start: int) -> ToolCall:
        return self.read_head_and_arguments(turn, start)[0]

    @abstractmethod
    def follow_head_and_arguments(self, follower: TurnFollower, start: int) -> Waiting[tuple[FollowedCall, int]]:
        """Follow a call up to its closing tag; return it and the index at which the tag should be."""

    def read_name_and_id(self, turn: Turn, start: int) -> tuple[str, str | None]:
        """Return the name of a malformed call, if it has one, and its id."""
        return "", None

    @abstractmethod
    def read_head_and_arguments(self, turn: Turn, start: int) -> tuple[ToolCall, int]:
        """Read a call up to its closing tag; return it and the index at which the tag should be."""
