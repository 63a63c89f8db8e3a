"""
Finds the calls of a turn in any format.

Tags are found in the decoded text, so their tokenization changes nothing: a tag may be one id or several. A tag inside
the arguments of a well-formed JSON call, or inside reasoning, is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

import regex  # type: ignore[import-untyped]  # the package has no types
import structlog

from turnwise import Chat, ReasoningParser, Resources, ToolCall
from turnwise.errors import ConfigError
from turnwise.protocols import TurnStream
from turnwise.types import TokenArray, ToolSchema
from turnwise_tool_formats.call_frame import CallFrame
from turnwise_tool_formats.config import LimitConfig, ParserConfig
from turnwise_tool_formats.following import Follower, Region, Waiting
from turnwise_tool_formats.prompts import opens_reasoning
from turnwise_tool_formats.schema_values import ArgumentTypes
from turnwise_tool_formats.turn import Grammar, Turn, TurnFollower, WrittenGrammar
from turnwise_tool_formats.written import WrittenFormat

_SPACE: Final = re.compile(r"\s*+")
_MAX_REPEATED: Final = 512
"""The repetitions in an opening match fewer characters together."""


class FormatParser:
    """
    A tool parser of one format.

    Args:
        grammar: the format.
        config: its options.
        resources: the chat template, which decodes the token ids of a turn, and the tools, whose schemas give types.

    Attributes:
        grammar: the format.
        starts_in_reasoning: a turn starts inside reasoning.
        reasoning_parser: of the format's own reasoning; None if it has none.
        tool_format: writes tools and calls; None if the format has no text for prompts.

    Raises:
        ConfigError: the run has no chat template.
    """

    def __init__(self, grammar: Grammar, config: LimitConfig, resources: Resources) -> None:
        if resources.chat is None:
            raise ConfigError(
                f"tool parser {grammar.name!r} reads text: the run needs a model directory with a tokenizer"
            )
        self.grammar: Final = grammar
        self.reasoning_parser: Final[ReasoningParser | None] = grammar.reasoning_parser
        self.tool_format: Final = (
            WrittenFormat(grammar, self._read_written) if isinstance(grammar, WrittenGrammar) else None
        )
        self._chat: Final[Chat] = resources.chat
        self._max_depth: Final = config.max_depth
        self._types: Final = ArgumentTypes(resources.tool_schemas)
        tags = config if isinstance(config, ParserConfig) else None
        self._think: Final = tags.reasoning_open_tag if tags else ""
        self._unthink: Final = tags.reasoning_close_tag if tags else ""
        self.starts_in_reasoning: Final = tags is not None and self._starts_inside(tags)
        # No group around an alternative: `re` then skips to their first characters, which is a hundred times as fast.
        self._opening: Final = re.compile("|".join(filter(None, (grammar.opening, re.escape(self._think)))))
        closing = "".join(f"|{re.escape(tag)}" for tag in grammar.closing)
        self._ends: Final = re.compile(f"(?P<opens>{grammar.opening}){closing}")
        # `re` cannot tell that the end of a text may be the start of a match.
        self._may_open: Final = regex.compile(self._opening.pattern)
        self._may_be_bare: Final = regex.compile(grammar.bare.pattern) if grammar.bare else None

    def parse(self, token_ids: TokenArray) -> tuple[str, tuple[ToolCall, ...]]:
        return self._parse(token_ids, self._types)

    def parse_for(self, token_ids: TokenArray, tools: Sequence[ToolSchema]) -> tuple[str, tuple[ToolCall, ...]]:
        """Return text and calls as `parse` does, with the types of these tools instead of the run's."""
        return self._parse(token_ids, ArgumentTypes(tools))

    def _parse(self, token_ids: TokenArray, types: ArgumentTypes) -> tuple[str, tuple[ToolCall, ...]]:
        try:
            text = self._chat.text(token_ids)
        except Exception as error:  # noqa: BLE001 - tokenizers raise anything for unknown ids; parsing never raises
            why = f"its tokens cannot be decoded ({type(error).__name__})"
            return "", (self._turn("").refuse(why, ""),)
        return self._read(text, types)

    def frame(self, name: str) -> CallFrame | None:
        """Return the text around the arguments of a tool's calls; None if they are no JSON, or a name does not fit."""
        frame = self.grammar.frame(name, getattr(self._chat.tokenizer, "added_tokens", ()))
        if frame is None:
            return self.tool_format.frame(name) if self.tool_format else None
        found = self._read_written(frame.example(), ArgumentTypes(()))
        return frame if [(each.name, each.error) for each in found] == [(name, "")] else None

    def parse_text(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text outside the calls, reasoning included, and the calls in order."""
        return self._read(text, self._types)

    def parse_content(self, text: str, tools: Sequence[ToolSchema]) -> tuple[str, tuple[ToolCall, ...]]:
        """Return text and calls, with the types of these tools, of a turn from which its reasoning was taken."""
        return self._find_calls(self._turn(text, ArgumentTypes(tools)), 0)

    def _read(self, text: str, types: ArgumentTypes) -> tuple[str, tuple[ToolCall, ...]]:
        start = self._after_reasoning(text, 0) if self.starts_in_reasoning else 0
        return self._find_calls(self._turn(text, types), start)

    def _read_written(self, text: str, types: ArgumentTypes) -> tuple[ToolCall, ...]:
        """Return the calls of a turn that a prompt shows; no prompt opens its reasoning."""
        return self._find_calls(self._turn(text, types), 0)[1]

    def _find_calls(self, turn: Turn, at: int) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text outside the calls at or after `at`, which is -1 if there are none, and the calls."""
        kept = 0
        content: list[str] = []
        calls: list[ToolCall] = []
        for region in self._find_regions(turn, at):
            content.append(turn.text[kept : region.start])
            calls.extend(region.calls)
            kept = region.stop
        content.append(turn.text[kept:])
        return "".join(content), tuple(calls)

    def find_regions(self, turn: Turn) -> list[Region]:
        """Return the calls of a whole turn, and the parts of it that are not content because of them."""
        return self._find_regions(turn, self._after_reasoning(turn.text, 0) if self.starts_in_reasoning else 0)

    def _find_regions(self, turn: Turn, at: int) -> list[Region]:
        text = turn.text
        regions: list[Region] = []
        starts = True  # nothing but reasoning came before, so a call needs no opening tag
        while at >= 0 and (opening := self._next_opening(turn, at, starts)):
            if opening.group() == self._think:
                starts = starts and not text[at : opening.start()].strip()
                at = self._after_reasoning(text, opening.end())
                continue
            found = self.grammar.read(turn, opening)
            starts = False
            if found is None:
                at = opening.end()
                continue
            at = found[1]
            regions.append(Region(opening.start(), at, found[0]))
        return regions

    def find_arguments(self, call: ToolCall) -> str | None:
        """Return the arguments of a call as the turn writes them; None if that takes a walk."""
        return None if call.error else self.grammar.find_arguments(call)

    def follow(self, tools: Sequence[ToolSchema]) -> TurnStream:
        """Return the reader of a turn that is being sampled, as `turnwise.protocols.StreamingParser`."""
        types = ArgumentTypes(tools)
        return Follower(self, partial(self._turn, types=types), types.names)

    def walk(self, follower: TurnFollower) -> Waiting[None]:
        """Follow a turn from its start, call after call; `MalformedError` at the first mistake."""
        at, starts = 0, True
        if self.starts_in_reasoning:
            at = yield from self._wait_after_reasoning(follower, 0)
        while True:
            opening = yield from self._wait_for_opening(follower, at, starts)
            if opening.group() == self._think:
                starts = starts and not follower.text[at : opening.start()].strip()
                at = yield from self._wait_after_reasoning(follower, opening.end())
                continue
            starts = False
            follower.settled = opening.start()
            stop = yield from self.grammar.follow(follower, opening)
            at = opening.end() if stop is None else stop
            if stop is not None:
                follower.end_region(stop)

    def _wait_for_opening(self, follower: TurnFollower, at: int, starts: bool) -> Waiting[re.Match[str]]:
        if starts and self.grammar.bare and self._may_be_bare:
            while True:
                space = _SPACE.match(follower.text, at)
                start = space.end() if space else at
                if bare := self.grammar.bare.match(follower.text, start):
                    return bare
                if self._may_be_bare.match(follower.text, start, partial=True) is None:
                    break
                follower.settled = start
                yield
        if (waiting := self.grammar.wait_for_opening(follower, at)) is not None:
            return (yield from waiting)
        while (opening := self._opening.search(follower.text, at)) is None:
            if not follower.is_whole:  # then the regions tell what is content
                follower.settled = at = self._before_unfinished_opening(follower.text, at)
            yield
        return opening

    def _wait_after_reasoning(self, follower: TurnFollower, at: int) -> Waiting[int]:
        """Return the index after the reasoning that contains `at`; all of it is content."""
        while (close := follower.text.find(self._unthink, at)) < 0:
            follower.settled = len(follower.text)
            at = max(at, len(follower.text) - len(self._unthink) + 1)
            yield
        return close + len(self._unthink)

    def settled(self, text: str) -> int:
        """Return how many characters of an unfinished turn begin its content, however the turn continues."""
        turn = self._turn(text)
        if (known := self.grammar.settled(turn)) is not None:
            return known
        at, starts = self._after_reasoning(text, 0) if self.starts_in_reasoning else 0, True
        while at >= 0:
            start = turn.skip_space(at)
            if starts and self._may_be_bare is not None and self._may_be_bare.match(text, start, partial=True):
                return start
            opening = turn.search(self._opening, at)
            if opening is None:
                return self._before_unfinished_opening(text, at)
            if opening.group() != self._think:
                return opening.start()
            starts = starts and not text[at : opening.start()].strip()
            at = self._after_reasoning(text, opening.end())
        return len(text)

    def _before_unfinished_opening(self, text: str, at: int) -> int:
        # Only the end of the text needs this slower search: no opening is longer than its longest repetition and tags.
        start = max(at, len(text) - _MAX_REPEATED - len(self._opening.pattern))
        opening = self._may_open.search(text, start, partial=True)
        return len(text) if opening is None else opening.start()

    def _starts_inside(self, tags: ParserConfig) -> bool:
        """Return whether a turn starts inside reasoning; an option that contradicts the chat template is reported."""
        opened = opens_reasoning(self._chat, tags.reasoning_open_tag, tags.reasoning_close_tag)
        if opened and tags.starts_in_reasoning is False:
            structlog.get_logger().warning(
                "reasoning of the prompt is ignored",
                parser=self.grammar.name,
                reason=f"prompts open {tags.reasoning_open_tag}, and starts_in_reasoning is false: calls in it run",
            )
        return opened if tags.starts_in_reasoning is None else tags.starts_in_reasoning

    def _turn(self, text: str, types: ArgumentTypes | None = None) -> Turn:
        types = self._types if types is None else types
        return Turn(text=text, grammar=self.grammar, ends=self._ends, max_depth=self._max_depth, types=types)

    def _next_opening(self, turn: Turn, at: int, starts: bool) -> re.Match[str] | None:
        if starts and self.grammar.bare and (bare := self.grammar.bare.match(turn.text, turn.skip_space(at))):
            return bare
        return self.grammar.find(turn, at, self._opening)

    def _after_reasoning(self, text: str, start: int) -> int:
        """Return the index after the reasoning that contains `start`; -1 if it does not end."""
        close = text.find(self._unthink, start)
        return close if close < 0 else close + len(self._unthink)
