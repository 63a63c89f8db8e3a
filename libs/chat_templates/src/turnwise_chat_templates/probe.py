"""
Probe conversations, which show how a chat template renders messages.

A probe is a user's message, a turn of the model that consists of marks, and new messages whose contents are marks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from attrs import frozen

Plain = dict[str, Any]
"""A message as templates expect it."""

BASE: tuple[Plain, ...] = ({"role": "user", "content": "probe"},)
TURN_MARK = "tw7turn"
"""Placeholder for sampled text, in the content of a turn and in the arguments of its calls."""
REASON_MARK = "tw7reason"
CONTENTS = (
    "plain",
    "",
    "  spaces around  ",
    "\n\nlines\n\naround\n\n",
    '{"result": [1, 2.5, null], "text": "a \\"quoted\\" word"}',
    "ünïcödé → 世界 🙂\u200b\u00a0",
    "<b>&amp;</b> \\n {{ braces }} {% raw %}",
    "<think>\nreasoning\n</think>\n\nanswer",
)
"""Contents of new messages on which templates are known to differ."""
_PROBE_TOOL: Plain = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe": {"type": "string", "description": "A text."}},
            "required": ["probe"],
        },
    },
}


@frozen(kw_only=True)
class Turn:
    """
    The form of the probe's assistant message.

    Attributes:
        num_calls: tool calls in it, 0 for none.
        content: whether it has content besides its calls.
        arguments_as_text: the arguments of a call are JSON, not an object.
    """

    num_calls: int = 0
    content: bool = True
    arguments_as_text: bool = False

    def message(self, answers: Sequence[Plain] = (), reasoning: str = "") -> Plain:
        """Return the assistant message, its calls named as in the tool messages that answer them."""
        content = reasoning + TURN_MARK if self.content else None
        calls = [self._call(index, answers[index : index + 1]) for index in range(self.num_calls)]
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}

    def _call(self, index: int, answer: Sequence[Plain]) -> Plain:
        arguments = {"probe": TURN_MARK}
        named = _answer_keys(index) | (dict(answer[0]) if answer else {})
        function = {"name": named["name"], "arguments": json.dumps(arguments) if self.arguments_as_text else arguments}
        return {"id": named["tool_call_id"], "type": "function", "function": function}


def turns(roles: Sequence[str]) -> Iterator[Turn]:
    """Yield forms of the turn before such messages, the most telling first: tool results answer tool calls."""
    num_calls = num_leading_tools(roles)
    if num_calls:
        for content, arguments_as_text in itertools.product((True, False), (False, True)):
            yield Turn(num_calls=num_calls, content=content, arguments_as_text=arguments_as_text)
    yield Turn()


def num_leading_tools(roles: Sequence[str]) -> int:
    """Return how many of the first messages answer calls of the turn."""
    return len(list(itertools.takewhile(lambda role: role == "tool", roles)))


def with_answer_keys(messages: Sequence[Plain]) -> list[Plain]:
    """Return the messages, tool messages completed by the name and id that templates may ask for."""
    return [
        _answer_keys(index) | message if message["role"] == "tool" else message
        for index, message in enumerate(messages)
    ]


def _answer_keys(index: int) -> Plain:
    # Nine letters and digits: the only ids that Mistral's templates take.
    return {"name": "probe", "tool_call_id": f"call{index:05d}"}


def probe_messages(roles: Sequence[str], contents: Sequence[str] = ()) -> list[Plain]:
    """Return new messages of these roles; their contents are marks unless given."""
    texts = contents or [f"tw7new{index}x" for index in range(len(roles))]
    return with_answer_keys([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])


def renamed(messages: Sequence[Plain], key: str) -> list[Plain]:
    """Return the messages with another name or id in each."""
    return [{**message, key: f"other{index:04d}"} for index, message in enumerate(messages)]


def rotations(num_messages: int, contents: Sequence[str]) -> Iterator[list[str]]:
    """Yield a content for each message, so that every content takes every place once."""
    for first in range(len(contents)):
        yield [contents[(first + index) % len(contents)] for index in range(num_messages)]


def inline_reasoning(turn: Turn) -> Plain:
    """Return the turn with its reasoning in the content, as it is sampled."""
    return turn.message(reasoning=f"<think>\n{REASON_MARK}\n</think>\n\n")


def separate_reasoning(turn: Turn) -> Plain:
    """Return the turn with its reasoning beside the content, under both names in use."""
    return {**turn.message(), "reasoning_content": REASON_MARK, "thinking": REASON_MARK}


def contexts(turn: Turn, roles: Sequence[str]) -> Iterator[tuple[str, list[Plain], list[Plain]]]:
    """Yield conversations that end with the probe's turn: a name, the messages, and the tools."""
    last, answer = turn.message(), {"role": "assistant", "content": "probe"}
    yield "when tools are given", [*BASE, last], [_PROBE_TOOL]
    yield "after reasoning", [*BASE, separate_reasoning(turn)], []
    yield "after reasoning in the content", [*BASE, inline_reasoning(turn)], []
    yield "after a system message", [{"role": "system", "content": "probe"}, *BASE, last], []
    yield "later in a conversation", [*BASE, answer, *BASE, last], []
    if count := num_leading_tools(roles):
        results = probe_messages(["tool"] * count, ["probe"] * count)
        yield "after earlier tool results", [*BASE, last, *results, last], []
        yield "after the tool results of an earlier task", [*BASE, last, *results, answer, *BASE, last], []


@lru_cache(maxsize=64)
def template_words(source: str) -> tuple[tuple[str, str], ...]:
    """Return (kind, text) of each part of a Jinja source, in order; a text has the same ones in each chat."""
    import jinja2

    return tuple((token.type, token.value) for token in jinja2.Environment().lexer.tokenize(source))


@lru_cache(maxsize=64)
def adversarial_contents(sources: tuple[str, ...]) -> tuple[str, ...]:
    """
    Return contents made of the templates' own string literals.

    Besides white space, a template can treat only texts in a special way that it names itself. One content holds all
    literals. Literals that the template compares with, or tests the start or end of a text with, are separate contents.
    """
    literals: dict[str, None] = {}
    compared: dict[str, None] = {}
    for source in sources:
        words = template_words(source)
        for index, (kind, text) in enumerate(words):
            if kind == "string" and text:
                literals[text] = None
                if not _COMPARISONS.isdisjoint(words[max(index - 2, 0) : index]):
                    compared[text] = None
    edges = [f"{left}{literal}{right}" for literal in compared for left, right in (("", ""), ("x", ""), ("", "x"))]
    return (*([f"x {' x '.join(literals)} x"] if literals else []), *edges)


_COMPARISONS = frozenset({("eq", "=="), ("ne", "!="), ("name", "startswith"), ("name", "endswith")})


def common_start(first: str, second: str) -> int:
    """Return how many characters two texts have in common from their start."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def excerpt(actual: str, expected: str = "", width: int = 60) -> str:
    """Return where two texts part, quoted and shortened, as an error text says it."""
    at = max(common_start(actual, expected) - 15, 0)
    shown = repr(actual[at : at + width])
    return f"{shown} instead of {expected[at : at + width]!r}" if expected else shown
