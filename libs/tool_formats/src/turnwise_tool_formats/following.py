"""
Follows the calls of a turn while it is sampled.

A grammar follows the calls behind an opening in a generator, which yields where it needs more text. It decides nothing
that more text could change, so its results do not depend on the places at which the turn was cut. Each character is
read once, but for a bounded number before the end of the text and once more when a call is complete: then the grammar
reads the call as in a whole turn, and a call with a mistake is followed no further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Sequence
from functools import lru_cache
from typing import Final, Generic, Protocol, TypeVar

import regex  # type: ignore[import-untyped]  # the package has no types
from attrs import define, evolve, field

from turnwise import ToolCall
from turnwise.messages import CallSoFar, TurnSoFar, format_arguments
from turnwise_strict_json import MalformedError, read_arguments

_SPACE: Final = re.compile(r"\s*+")
T = TypeVar("T")
Whole = TypeVar("Whole")
"""The text of a turn for a reader of whole turns."""
Waiting = Generator[None, None, T]
"""Yields where it needs more text."""


@define(eq=False)
class FollowedCall:
    """
    A call whose arguments come.

    Attributes:
        name: of the tool.
        is_known: the turn may call a tool of this name; another call is shown when it is complete.
        taken: index of the first character of the turn that is not part of `arguments` yet.
        id: that the model wrote before the arguments; None if it wrote none there.
        arguments: how their JSON begins. Their last bracket is not there before the call is complete, so that no
            client can take a malformed call for a good one.
        held: the rest of the arguments, when they have ended; empty before.
        is_complete: the call has no mistake.
    """

    name: str
    is_known: bool
    taken: int
    id: str | None = None
    arguments: str = ""
    held: str = ""
    is_complete: bool = False

    @property
    def is_shown(self) -> bool:
        """Whether the call is decided."""
        return self.is_known or self.is_complete

    def add(self, text: str, taken: int) -> None:
        """Add to the arguments what the characters before `taken` mean."""
        self.arguments += text
        self.taken = taken

    def complete(self) -> None:
        """Add the rest of the arguments."""
        self.arguments, self.held, self.is_complete = self.arguments + self.held, "", True


@define(eq=False)
class Region:
    """The calls behind one opening, and the part of the turn that is not content because of them."""

    start: int
    stop: int
    calls: Sequence[ToolCall]


class FollowingParser(Protocol[Whole]):
    """The part of a parser that a follower needs."""

    def walk(self, follower: Follower[Whole]) -> Waiting[None]:
        """Follow a turn from its start."""

    def find_regions(self, turn: Whole) -> list[Region]:
        """Return the calls of a whole turn."""

    def find_arguments(self, call: ToolCall) -> str | None:
        """Return the arguments of a call as the turn writes them; None if that takes a walk."""


@define(eq=False)
class Follower(Generic[Whole]):
    """
    The `turnwise.protocols.TurnStream` of a grammar.

    Attributes:
        parser: whose grammar follows the calls.
        build_turn: returns the turn with a text, for reading a part of it as a whole.
        names: of the tools that a turn may call.
        text: of the turn so far.
        is_whole: the turn has ended.
        settled: index after the content that is decided.
        calls: so far.
    """

    parser: FollowingParser[Whole]
    build_turn: Callable[[str], Whole]
    names: Collection[object]
    text: str = field(default="", init=False)
    is_whole: bool = field(default=False, init=False)
    settled: int = field(default=0, init=False)
    calls: list[FollowedCall] = field(factory=list, init=False)
    _kept: int = field(default=0, init=False)
    _texts: list[str] = field(factory=list, init=False)
    _walk: Waiting[None] | None = field(default=None, init=False)
    _whole_turn: Whole | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._walk = self.parser.walk(self)

    def read(self, text: str, *, is_whole: bool = False) -> TurnSoFar:
        """Return how a turn begins, as `TurnStream.read`."""
        is_new, self.text, self.is_whole = not self.text, text, is_whole
        if is_new and is_whole and (turn := self._read_at_once()) is not None:
            return turn
        try:
            if self._walk is not None:
                next(self._walk)
        except (StopIteration, MalformedError):
            self._walk = self._whole_turn = None  # only the whole turn tells where a call with a mistake ends
        return self._finish() if is_whole else self._describe()

    def begin(self, name: str, taken: int, call_id: str | None = None) -> FollowedCall:
        """Add a call, whose arguments come from `taken` on; `MalformedError` for a name that no call can have."""
        name = name.strip()
        if not name or not is_text(name):
            raise MalformedError("the name is empty")
        self._texts.append(self.text[self._kept : self.settled])
        self._kept = self.settled
        self.calls.append(FollowedCall(name, name in self.names, taken, call_id))
        return self.calls[-1]

    def end_region(self, stop: int) -> None:
        """Continue with content from `stop` on."""
        self._kept = self.settled = stop

    def match(self, pattern: re.Pattern[str], at: int) -> Waiting[re.Match[str]]:
        """Return the match at an index of a pattern that ends with a fixed text; `MalformedError` if there is none."""
        while (found := pattern.match(self.text, at)) is None:
            if self.is_whole or _allow_partial(pattern).match(self.text, at, partial=True) is None:
                raise MalformedError("another text comes next")
            yield
        return found

    def joins(self, pattern: re.Pattern[str], at: int) -> Waiting[re.Match[str] | None]:
        """Return the match at an index of a pattern that ends with a fixed text; None if there will be none."""
        try:
            return (yield from self.match(pattern, at))
        except MalformedError:
            return None

    def search(
        self, pattern: re.Pattern[str], at: int, note: Callable[[int], object] = lambda _stop: None
    ) -> Waiting[re.Match[str]]:
        """Return the first match at or after an index; `note` gets the index before which there is none."""
        while (found := pattern.search(self.text, at)) is None:
            partial = _allow_partial(pattern).search(self.text, at, partial=True)
            at = len(self.text) if partial is None else partial.start()
            note(at)
            yield
        note(found.start())
        return found

    def skip_space(self, at: int) -> Waiting[int]:
        """Return the index of the next character that is not white space."""
        while True:
            space = _SPACE.match(self.text, at)
            at = space.end() if space else at
            if at < len(self.text):
                return at
            yield

    def skip_tag(self, tags: Sequence[str], at: int) -> Waiting[tuple[str, int]]:
        """Return the tag that comes next, perhaps after white space, and the index after it; an empty tag for none."""
        start = yield from self.skip_space(at)
        while True:
            tag = next((each for each in tags if self.text.startswith(each, start)), "")
            rest = self.text[start : start + max(map(len, tags))]
            if tag or not any(each.startswith(rest) for each in tags):
                return tag, (start + len(tag) if tag else at)
            yield

    def require_tag(self, tag: str, at: int) -> Waiting[int]:
        """Return the index after a tag that comes next; `MalformedError` if there is another text."""
        found, stop = yield from self.skip_tag((tag,), at)
        if not found:
            raise MalformedError("another text comes next")
        return stop

    def check(self, read: Callable[[Whole], ToolCall]) -> None:
        """Read a followed call as in a whole turn; `MalformedError` if it has a mistake."""
        turn = self.build_turn(self.text)
        if self.is_whole:
            # Kept for the end, which reads the same calls again: the turn remembers those without a mistake.
            turn = self._whole_turn = self._whole_turn or turn
        if error := read(turn).error:
            raise MalformedError(error)

    def _describe(self) -> TurnSoFar:
        shown = next((i for i, call in enumerate(self.calls) if not call.is_shown), len(self.calls))
        last = self.text[self._kept : self.settled] if shown == len(self.calls) else self._texts[shown]
        calls = tuple(
            CallSoFar(name=each.name, arguments=each.arguments, is_complete=each.is_complete, id=each.id)
            for each in self.calls[:shown]
        )
        return TurnSoFar(texts=(*self._texts[:shown], last), calls=calls)

    def _read_at_once(self) -> TurnSoFar | None:
        """Return a whole turn of which no part was read; None if only its walk tells how the arguments are written."""
        regions = self.parser.find_regions(self.build_turn(self.text))
        written = [self.parser.find_arguments(call) for region in regions for call in region.calls]
        if None in written:
            return None
        return self._arrange(
            regions,
            lambda call, index, _: CallSoFar(
                name=call.name, arguments=written[index] or "", is_complete=True, late_id=call.id
            ),
        )

    def _finish(self) -> TurnSoFar:
        return self._arrange(self.parser.find_regions(self.build_turn(self.text)), self._finish_call)

    def _arrange(self, regions: list[Region], finish: Callable[[ToolCall, int, Region], CallSoFar]) -> TurnSoFar:
        texts: list[str] = []
        calls: list[CallSoFar] = []
        kept = 0
        for region in regions:
            texts += [self.text[kept : region.start], *[""] * (len(region.calls) - 1)]
            calls += [finish(call, i, region) for i, call in enumerate(region.calls, len(calls))]
            kept = region.stop
        return TurnSoFar(texts=(*texts, self.text[kept:]), calls=tuple(calls))

    def _finish_call(self, call: ToolCall, index: int, region: Region) -> CallSoFar:
        followed = self.calls[index] if index < len(self.calls) else None
        if not call.error:
            whole = followed is not None and (followed.is_complete or followed.held)
            text = followed.arguments + followed.held if followed and whole else format_arguments(call)
            early = followed.id if followed else None
            found = CallSoFar(name=call.name, arguments=text, is_complete=True, id=early)
            return found if call.id == early else evolve(found, late_id=call.id)
        if followed is None or not followed.is_shown:
            return CallSoFar(name=call.name, arguments=call.raw, late_id=call.id)
        stop = self.text.find(call.raw, region.start) + len(call.raw)
        text = followed.arguments + self.text[followed.taken : max(stop, followed.taken)]
        # Its JSON may be whole, and its mistake another one.
        text = text if read_arguments(text) is None else followed.arguments
        return CallSoFar(name=followed.name, arguments=text, id=followed.id)


def is_text(name: str) -> bool:
    """Return whether a text has a form in UTF-8, unlike one with half of a surrogate pair."""
    try:
        json.dumps(name, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@lru_cache(maxsize=256)
def _allow_partial(pattern: re.Pattern[str]) -> regex.Pattern:
    # `re` cannot tell that the end of a text may be the start of a match.
    return regex.compile(pattern.pattern, pattern.flags & (re.DOTALL | re.VERBOSE))
