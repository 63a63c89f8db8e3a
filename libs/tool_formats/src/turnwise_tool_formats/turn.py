"""
The text of one turn while its calls are read, and the interface of a format.

All formats share the limits here. Values may contain tags in their texts, so the value decides where a call ends. A
failed attempt to read a value may read to the end of the turn, which makes many failed attempts quadratic. Beyond a
budget, values therefore end at the next tag, and parsing stays linear in the length of the text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from attrs import define, evolve, field

from turnwise import ReasoningParser, ToolCall
from turnwise.types import JsonObject
from turnwise_strict_json import MalformedError, check_value, load_json, read_json
from turnwise_tool_formats.call_frame import CallFrame
from turnwise_tool_formats.following import Follower, Waiting, is_text
from turnwise_tool_formats.schema_values import ArgumentTypes

_KINDS: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_SPACE: Final = re.compile(r"\s*")
NEXT_JSON: Final = re.compile(
    r'\s*+(?:[,;]\s*+(?=\{|\[\s*+\{)|(?=\[?\s*+\{\s*+"(?:name|arguments|parameters|type|id|function)"))'
)
"""Before more calls: a separator, or an object with a key of a call."""
_MAX_ID_CHARS: Final = 128
Found = tuple[list[ToolCall], int]
"""Calls in order, and the index at which the search for the next one continues."""


class Grammar(ABC):
    """
    One format of calls.

    Attributes:
        name: of the format in configs.
        form: a call in the format, for error texts.
        opening: regular expression of the texts that start a call, whatever comes before.
        closing: tags that end a call.
        must_close: a call without its closing tag is malformed.
        argument_keys: of a call's object, either of which holds the arguments; errors name the first.
        reasoning_parser: of the format's own reasoning; None if the reasoning has tags that differ between models.
        bare: how a call starts that has no opening tag; such calls are only at the start of a turn.
    """

    name: ClassVar[str]
    form: str
    opening: str
    closing: tuple[str, ...] = ()
    must_close: ClassVar[bool] = False
    argument_keys: ClassVar[tuple[str, ...]] = ("arguments", "parameters")
    reasoning_parser: ClassVar[ReasoningParser | None] = None
    bare: ClassVar[re.Pattern[str] | None] = None

    def find(self, turn: Turn, at: int, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the next opening at or after `at`, which is outside calls; `pattern` finds those of most formats."""
        return turn.search(pattern, at)

    def settled(self, turn: Turn) -> int | None:
        """Return how much of an unfinished turn is content, as `FormatParser.settled`; None: its openings tell."""
        return None

    @abstractmethod
    def read(self, turn: Turn, opening: re.Match[str]) -> Found | None:
        """Read the calls after an opening; None when a bare start is no call."""

    def frame(self, name: str, tags: Collection[str]) -> CallFrame | None:
        """
        Return the text around the arguments of a tool's calls; None if the format writes them not as JSON.

        Args:
            name: of the tool.
            tags: texts that the model's tokenizer adds to its vocabulary, which tell versions of a format apart.
        """
        return None

    def wait_for_opening(self, follower: TurnFollower, at: int) -> Waiting[re.Match[str]] | None:
        """Return the waiting for the opening that `find` finds at or after `at`; None: `opening` tells it."""
        return None

    def follow(self, follower: TurnFollower, opening: re.Match[str]) -> Waiting[int | None]:
        """
        Follow the calls that `read` reads, while they are sampled.

        Returns:
            The index at which the search for the next call continues; None when a bare start is no call.

        Raises:
            MalformedError: a call has a mistake, or cannot be followed. `Follower` has what is decided until then.
        """
        raise MalformedError("calls of this format come at the end of a turn")
        yield

    def find_arguments(self, call: ToolCall) -> str | None:
        """Return the arguments of a good call as its text writes them; None where only `follow` can tell."""
        return None


class WrittenGrammar(Grammar):
    """
    A format that models can learn from a system prompt.

    Attributes:
        instructions: how a system prompt tells a model to call a tool; an example of a call follows.
    """

    instructions: str

    @abstractmethod
    def write(self, content: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
        """Return a turn with calls, each given by its name and its arguments."""


class FramedGrammar(WrittenGrammar):
    """A format whose calls are texts around the JSON of their arguments, so that `frame` tells how to write them."""

    instructions = (
        "To call a function, reply in the following form, and write several calls one after another inside of it:"
    )

    @abstractmethod
    def frame(self, name: str, tags: Collection[str]) -> CallFrame:
        """Return the text around the arguments of a tool's calls, as `Grammar.frame`; it has one for each name."""

    def write(self, content: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
        """Return a turn in the version for tokenizers without own tags: others have a chat template with tools."""
        frames = [self.frame(name, ()) for name, _ in calls]
        if not frames:
            return content
        written = [frame.write(dump_json(calls[number][1]), number) for number, frame in enumerate(frames)]
        return join_lines(content, [f"{frames[0].first}{frames[0].between.join(written)}{frames[0].last}"])


def join_lines(content: str, calls: Iterable[str]) -> str:
    """Return a turn with each call on lines below its text, if it has one."""
    return "\n".join(filter(None, (content, *calls)))


@define
class Turn:
    """
    The text of one turn.

    Attributes:
        text: of the turn.
        grammar: of its calls.
        ends: regular expression of the tags that end a malformed call; its group `opens` is an opening.
        max_depth: deepest nesting of a call's values.
        types: of the arguments of the run's tools.
        is_cut: the turn ended within the value that was read last.
    """

    text: str
    grammar: Grammar
    ends: re.Pattern[str]
    max_depth: int
    types: ArgumentTypes
    is_cut: bool = False
    _spent: int = 0
    _part: tuple[int, int, str] = field(default=(0, 0, ""))

    def search(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """Return the first match at or after `start`."""
        return pattern.search(self.text, start)

    def skip_space(self, start: int) -> int:
        """Return the index of the first character at or after `start` that is not white space."""
        match = _SPACE.match(self.text, start)
        return match.end() if match else start

    def skip(self, tag: str, start: int) -> int:
        """Return the index after a tag that comes next or after white space; -1 if there is none."""
        at = self.skip_space(start)
        return at + len(tag) if self.text.startswith(tag, at) else -1

    def read_value(self, read: Callable[[str, int], tuple[Any, int]], start: int) -> tuple[Any, int]:
        """Read a value with a function of text and index, within the budget; `MalformedError` when there is none."""
        self.is_cut = False
        if self._spent <= 2 * len(self.text):
            try:
                return read(self.text, start)
            except MalformedError as error:
                self._spent += len(self.text) // 8
                self.is_cut = _is_cut(error, self.text)
                raise
        first, last, part = self._part
        if not first <= start < last:
            tag = self.search(self.ends, start)
            # One part serves all values up to the next tag: to copy it for each would be quadratic.
            first, last = start, tag.start() if tag else len(self.text)
            part = self.text[first:last]
            self._part = (first, last, part)
        value, stop = read(part, start - first)
        return value, first + stop

    def read_call(self, start: int) -> tuple[ToolCall, int]:
        """Read the call that is a JSON object at `start`; `MalformedError` when there is no JSON."""
        value, stop = self.read_value(read_json, start)
        return self.build_from_object(value, self.text[self.skip_space(start) : stop]), stop

    def build_from_object(self, value: object, raw: str) -> ToolCall:
        """Build a call from a JSON object with a name and arguments, and perhaps an id."""
        return with_id(self._build_from_object(value, raw), value.get("id") if isinstance(value, dict) else None)

    def _build_from_object(self, value: object, raw: str) -> ToolCall:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(value, dict):
            return self.refuse(f"expected a JSON object, got {_KINDS[type(value)]}", raw)
        if not isinstance(name, str):
            why = (
                f'"name" must be a string, got {_KINDS[type(name)]}' if "name" in value else 'the key "name" is missing'
            )
            return self.refuse(why, raw)
        keys = [key for key in self.grammar.argument_keys if key in value]
        if len(keys) > 1:
            return self.refuse(f'the arguments are given twice, as "{keys[0]}" and as "{keys[1]}"', raw, name)
        key = keys[0] if keys else None
        # Other keys are arguments that the model put in the wrong place, so only a name alone means "no arguments".
        if key is None and value.keys() - {"name", "id", "type"}:
            return self.refuse(f'the key "{self.grammar.argument_keys[0]}" is missing', raw, name)
        return self.build(name, value[key] if key else {}, raw)

    def build(self, name: str, arguments: object, raw: str) -> ToolCall:
        """Build a call, malformed when its name or arguments are."""
        name = name.strip()
        try:
            if not name:
                raise MalformedError("the name is empty")  # noqa: TRY301 - caught below, for the model
            check_value([name, arguments], raw, self.max_depth + 1)
            if isinstance(arguments, str):  # as in the OpenAI format
                arguments = self._load_arguments(arguments)
            if not isinstance(arguments, Mapping):
                raise MalformedError(f"the arguments must be an object, got {_KINDS[type(arguments)]}")  # noqa: TRY301 - as above
        except MalformedError as error:
            return self.refuse(str(error), raw, name)
        return ToolCall(name=name, arguments=arguments, raw=raw)

    def refuse(self, why: str, raw: str, name: str = "") -> ToolCall:
        """Return a call that cannot run, with an error that tells the model how to write one."""
        shown = name if is_text(name) else ""
        error = f"Error: this tool call is malformed: {why}. Write {self.grammar.form}"
        return ToolCall(name=shown, error=error, raw=raw)

    def refuse_to_next_tag(self, why: str, start: int, search_from: int, name: str = "") -> Found:
        """
        Return a malformed call from `start` to the next tag or the end of the turn, so that it hides no other.

        Tags in a value that the end of the turn cuts may be quoted, so the call then ends with the turn.
        """
        tag = None if self.is_cut else self.search(self.ends, search_from)
        raw = self.text[start : tag.start() if tag else None]
        if self.grammar.must_close and (tag is None or tag["opens"] is not None):
            why = "its closing tag is missing"
        elif not raw.strip():
            why = "it is empty"
        stop = len(self.text) if tag is None else tag.start() if tag["opens"] is not None else tag.end()
        return [self.refuse(why, raw, name)], stop

    def _load_arguments(self, text: str) -> Any:
        try:
            value = load_json(text)
            check_value(value, text, self.max_depth)
        except MalformedError as error:
            raise MalformedError(f"the arguments are a string, and {error}") from error
        return value


TurnFollower = Follower[Turn]


def with_id(call: ToolCall, call_id: object) -> ToolCall:
    """Return a call with the id that the model wrote, unless no client could read that as one."""
    if not isinstance(call_id, str) or not 0 < len(call_id) <= _MAX_ID_CHARS:
        return call
    return evolve(call, id=call_id) if call_id.isprintable() and not call_id.isspace() else call


def first_call(found: Found | None) -> ToolCall:
    """Return the first call that a grammar has read."""
    return found[0][0] if found else ToolCall(error="Error: it is no call")


def read_list(turn: Turn, start: int, read_item: Callable[[int], tuple[ToolCall, int]]) -> Found:
    """Read calls in square brackets from `start`, which is after the opening bracket."""
    calls: list[ToolCall] = []
    at = turn.skip_space(start)
    if (after := turn.skip("]", at)) >= 0:
        return [turn.refuse("the list holds no call", turn.text[at:after])], after
    while True:
        try:
            call, stop = read_item(at)
        except MalformedError as error:
            found, stop = turn.refuse_to_next_tag(str(error), at, at)
            return [*calls, *found], stop
        calls.append(call)
        if (after := turn.skip("]", stop)) >= 0:
            return calls, after
        at = turn.skip(",", stop)
        if at < 0:
            found, stop = turn.refuse_to_next_tag("the list of calls lacks a ',' or its ']'", stop, stop)
            return [*calls, *found], stop
        at = turn.skip_space(at)


def read_json_calls(turn: Turn, start: int) -> Found:
    """Read JSON objects, or objects in square brackets, from `start`; models join several with commas and the like."""
    calls: list[ToolCall] = []
    at = start
    while True:
        found, stop = _read_json_part(turn, at)
        calls.extend(found)
        # A part that no bracket ends is broken, and its error already covers the text up to a tag.
        joined = turn.text.startswith(("}", "]"), stop - 1) and NEXT_JSON.match(turn.text, stop)
        if not joined:
            return calls, stop
        at = joined.end()


def _read_json_part(turn: Turn, start: int) -> Found:
    if (inside := turn.skip("[", start)) >= 0:
        return read_list(turn, inside, turn.read_call)
    try:
        call, stop = turn.read_call(start)
    except MalformedError as error:
        return turn.refuse_to_next_tag(str(error), start, start)
    return [call], stop


def dump_json(value: object) -> str:
    """Return a value as JSON in one line, as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def _is_cut(error: MalformedError, text: str) -> bool:
    """Return whether a value is malformed because its text ended."""
    ended = error.position is not None and not text[error.position :].strip()
    return ended or error.problem.startswith("Unterminated string")
