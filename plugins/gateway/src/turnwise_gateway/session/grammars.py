"""
Writes the grammar of a turn: the form that a call asks for, behind free reasoning.

A grammar is a text in the Lark dialect of llguidance, which all engines with grammars read. Tokens that the tokenizer
adds to its vocabulary, such as tags of calls, are named by their ids, since their text alone would not match them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final

from attrs import define, field, frozen

from turnwise import Chat, ReasoningParser, ToolParser
from turnwise.errors import ConfigError
from turnwise.threads import in_thread
from turnwise.types import ToolSchema
from turnwise_gateway.calls import CallRefusedError, Constraint, ModelCall
from turnwise_tool_formats.frames import CallFrame, find_frame
from turnwise_tool_formats.prompts import opens_reasoning

_WHITE_SPACE: Final = "[ \\n\\r\\t]{0,40}"
"""Between the tokens of a JSON text: enough for indented lines, and no model writes it forever."""
_OPTIONS: Final = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
"""A client cannot set these, for they replace its own; `lenient` would ignore keywords."""
_MAX_ERROR_CHARS: Final = 500
_ANY_OBJECT: Final = {"type": "object"}


@frozen
class Reasoning:
    """
    The free text before the constrained part of a turn.

    Attributes:
        open_tag, close_tag: around it.
        is_open: the prompt has the first tag, so each turn has reasoning.
    """

    open_tag: str
    close_tag: str
    is_open: bool


def is_constrained(call: ModelCall) -> bool:
    """Return whether a grammar can keep the turn to the form that a call asks for; the wish for one call is no form."""
    return any(each.kind != "one_call" for each in call.constraints)


@define(eq=False)
class GrammarWriter:
    """
    Writes the grammars of a run's turns.

    Attributes:
        chat: whose tokenizer splits texts.
        parser: of calls, whose format a grammar writes; None if the run has none.
        reasoning: that turns may have; None in a run that does not split it.
    """

    chat: Chat
    parser: ToolParser | None
    reasoning: Reasoning | None

    @classmethod
    def of(cls, chat: Chat, parser: ToolParser | None, reasoning: ReasoningParser | None) -> GrammarWriter:
        """Return the writer of a run; `ConfigError` if the package is missing, or reasoning has no known tags."""
        if find_spec("llguidance") is None:
            raise ConfigError("agent.structured_output: constrain needs `pip install 'turnwise-gateway[grammar]'`")
        if reasoning is None:
            if getattr(parser, "starts_in_reasoning", False):
                text = "a prompt of the model opens reasoning, which would be constrained: set reasoning_parser"
                raise ConfigError(f"agent.structured_output: constrain: {text}")
            return cls(chat, parser, None)
        tags = getattr(reasoning, "tags", None)
        if tags is None:
            text = f"the reasoning parser {type(reasoning).__name__} has no tags, such as those of think_tags"
            raise ConfigError(f"agent.structured_output: constrain: {text}")
        open_tag, close_tag = tags
        return cls(chat, parser, Reasoning(open_tag, close_tag, opens_reasoning(chat, open_tag, close_tag)))

    def write(self, call: ModelCall) -> str | None:
        """
        Return the grammar of the turn that a call asks for; None if it asks for no form.

        Raises:
            CallRefusedError: the form needs calls, and the format of the run has no grammar, or a tool is unknown.
        """
        if not is_constrained(call):
            return None
        turn = _Turn(self.chat)
        forms = [*self._texts(call, turn), *self._calls(call, turn)]
        turn.add("body", " | ".join(forms))
        turn.add("start", " ".join((*self._before(turn), "body")))
        return turn.text

    async def check(self, call: ModelCall) -> None:
        """
        Refuse a call with a schema that no grammar can be made of, or that no text fits.

        The error names the field, and the keyword if one is the reason.
        """
        checked = [(each.param, each.schema) for each in call.constraints if each.schema is not None]
        if self._callable(call):
            checked += [("tools", _arguments(tool)) for tool in self._callable(call)]
        for param, schema in checked:
            if error := await in_thread(_find_error, {"grammar": f"start: {_json(schema)}"}):
                text = f"'{param}' has a schema that cannot constrain a reply: {error}"
                raise CallRefusedError("unsupported", text, param=param)

    def _before(self, turn: _Turn) -> Sequence[str]:
        """Return what comes before the constrained part: reasoning, and white space."""
        turn.add("SPACE", "/[ \\n\\r\\t]{1,8}/")
        if self.reasoning is None:
            return ("SPACE?",)
        turn.add_text_up_to("thought", self.reasoning.close_tag)
        if self.reasoning.is_open:
            return "thought", "SPACE?"
        opening = turn.literal(self.reasoning.open_tag)
        return f"(SPACE? {opening} thought)?", "SPACE?"

    def _texts(self, call: ModelCall, turn: _Turn) -> Sequence[str]:
        """Return the rules of a turn without a call, which a choice of tools excludes."""
        choice = _find(call, "named", "allowed", "required")
        if choice is not None and not choice.may_answer:
            return ()
        text = _find(call, "json_object", "json_schema")
        if text is not None:
            turn.add("reply", _json(_ANY_OBJECT if text.schema is None else text.schema))
        else:
            frame = next(iter(self._frames(call).values()))
            opening = "|".join(map(_pattern, frame.openings))
            turn.add("REPLY", f"/(?s:.+)/ & ~/(?s:.*)({opening})(?s:.*)/")
            turn.add("reply", "REPLY")
        return ("reply",)

    def _calls(self, call: ModelCall, turn: _Turn) -> Sequence[str]:
        """Return the rules of a turn with calls, if it may have any."""
        frames = self._frames(call)
        if not frames:
            return ()
        for number, tool in enumerate(self._callable(call)):
            frame = frames[tool["function"]["name"]]
            turn.add(f"arguments_{number}", _json(_arguments(tool)))
            turn.add(f"call_{number}", turn.around(f"arguments_{number}", frame))
        turn.add("call", " | ".join(f"call_{number}" for number in range(len(frames))))
        frame = next(iter(frames.values()))
        is_one = _find(call, "one_call", "named") is not None
        calls = "call" if is_one else f"call ({turn.literal(frame.between)} call)*"
        turn.add("calls", _join(turn.literal(frame.first), calls, turn.literal(frame.last)))
        return ("calls",)

    def _frames(self, call: ModelCall) -> Mapping[str, CallFrame]:
        """Return the frames of the calls that the turn may have, by the names of the tools."""
        choice, frames = _find(call, "named", "allowed", "required"), {}
        for tool in self._callable(call):
            name = tool["function"]["name"]
            frame = None if self.parser is None else find_frame(self.parser, name)
            if frame is not None:
                frames[name] = frame
            elif choice is not None or self.parser is not None:
                reason = (
                    "the run has no tool parser" if self.parser is None else "the format of its calls has no grammar"
                )
                param = "tools" if choice is None else choice.param
                raise CallRefusedError("unsupported", f"'{param}' cannot constrain the turn: {reason}", param=param)
        return frames

    def _callable(self, call: ModelCall) -> Sequence[ToolSchema]:
        """Return the tools that the turn may call."""
        choice = _find(call, "named", "allowed", "required")
        if choice is None:
            return () if call.tool_choice == "none" or self.parser is None else call.tools
        known = {tool["function"]["name"]: tool for tool in call.tools}
        names = choice.tools or tuple(known)
        for name in names:
            if name not in known:
                text = f"'tool_choice' names the tool {name!r}, whose schema is not in the request"
                raise CallRefusedError("unsupported", text, param=choice.param)
        if not names:
            raise CallRefusedError(
                "invalid", "'tool_choice' asks for a call, and there are no tools", param=choice.param
            )
        return [known[name] for name in dict.fromkeys(names)]


@define
class _Turn:
    """The rules of a grammar."""

    chat: Chat
    _rules: list[str] = field(factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self._rules) + "\n"

    def add(self, name: str, value: str) -> None:
        self._rules.append(f"{name}: {value}")

    def add_text_up_to(self, name: str, tag: str) -> None:
        """Add a rule of any text that ends with its first tag."""
        if tag in self._added:
            self.add(f"{name}_text", "/(?s:.*)/")
            self.add(name, f"{name}_text {self.literal(tag)}")
        else:
            self._rules.append(f"{name}[lazy]: /(?s:.*){_pattern(tag)}/")

    def around(self, rule: str, frame: CallFrame) -> str:
        start, rest = map(self.literal, frame.head)
        number = "" if frame.number_at < 0 else "/[0-9]{1,2}/"
        return _join(start, number, rest, rule, self.literal(frame.after))

    def literal(self, text: str) -> str:
        """Return a text as a sequence of strings and ids of added tokens."""
        pieces: Iterable[str] = (text,)
        if self._added:
            pieces = re.split(f"({'|'.join(map(re.escape, sorted(self._added, key=len, reverse=True)))})", text)
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, text: str) -> str:
        if text in self._added:
            (token_id,) = self.chat.tokenizer.encode(text)
            return f"<[{token_id}]>"
        return json.dumps(text)

    @property
    def _added(self) -> frozenset[str]:
        added: frozenset[str] = getattr(self.chat.tokenizer, "added_tokens", frozenset())
        return added


def _find(call: ModelCall, *kinds: str) -> Constraint | None:
    return next((each for each in call.constraints if each.kind in kinds), None)


def _join(*pieces: str) -> str:
    return " ".join(filter(None, pieces))


def _arguments(tool: ToolSchema) -> Mapping[str, Any]:
    return {"type": "object", **(tool["function"].get("parameters") or {})}


def _json(schema: Mapping[str, object]) -> str:
    return f"%json {json.dumps({**schema, **_OPTIONS})}"


def _pattern(text: str) -> str:
    """Return a regular expression in a grammar that matches a text."""
    # Only ASCII: a regular expression of llguidance knows no escapes of other characters.
    return re.sub(r"(?=[!-~])([^\w\s<>])", r"\\\1", text).replace("\n", "\\n")


@lru_cache(maxsize=512)
def _find_error(grammar: str) -> str:
    """Return why a grammar cannot be compiled, or allows no text, in one line; empty if it has texts."""
    from llguidance import LLMatcher, LLTokenizer

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not is_error:
        matcher = LLMatcher(LLTokenizer("byte"), grammar)
        matcher.compute_bitmask()  # a loop of references, which has no text, is an error only here
        return "no text fits it" if matcher.is_error() else ""
    # In front of it is the place in the grammar, and behind it the grammar itself.
    text = str(messages[0]).partition("failed to compile JSON schema: ")[2] or str(messages[0])
    return " ".join(text.partition("\n   1 | ")[0].split())[:_MAX_ERROR_CHARS]
