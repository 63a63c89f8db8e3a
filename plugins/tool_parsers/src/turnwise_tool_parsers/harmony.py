"""
Splits a turn in the harmony format of gpt-oss into its messages, and its reasoning from its text.

    turn    = message {message}
    message = header "<|message|>" TEXT ["<|end|>" | "<|call|>" | "<|return|>"]
    header  = ["<|start|>" ROLE] ["<|channel|>" CHANNEL] [" to=" RECIPIENT] ["<|constrain|>" TYPE], in any order

A prompt ends with `<|start|>assistant`, so a turn starts inside a header. All text up to `<|message|>` is the header,
and nothing in a message is one: a model quotes headers in its reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from attrs import frozen

from turnwise_tool_parsers.think_tags import overlap

START, MESSAGE, CALL = "<|start|>", "<|message|>", "<|call|>"
ENDS: Final = (CALL, "<|end|>", "<|return|>")
_MARKS: Final = (START, "<|channel|>", "<|constrain|>")
_RECIPIENT: Final = "to="
_MARK: Final = re.compile("|".join(map(re.escape, _MARKS)))
_END: Final = re.compile("|".join(map(re.escape, ENDS)))
_STOP: Final = re.compile("|".join(map(re.escape, (MESSAGE, START, *ENDS))))
_ANALYSIS: Final = re.compile(r"<\|channel\|>\s*+analysis")


@frozen
class HarmonyMessage:
    """
    A message of a turn, or text outside messages.

    Attributes:
        first: index of its first character; text before the header is outside messages.
        start: index of its header; equal to `stop` if it has none.
        stop: index after its header.
        tag: that ends the header: `<|message|>`, another one if that is missing, or nothing at the end of the turn.
        header: text of the header.
        body: index of its text.
        end: index after its text.
        after: index of the next message.
    """

    first: int
    start: int
    stop: int
    tag: str
    header: str
    body: int
    end: int
    after: int

    @property
    def is_call(self) -> bool:
        """The header has a recipient."""
        return _RECIPIENT in self.header

    @property
    def is_reasoning(self) -> bool:
        """The channel is `analysis`, and the message is no call."""
        return not self.is_call and _ANALYSIS.search(self.header) is not None


def read_messages(text: str, at: int = 0) -> Iterator[HarmonyMessage]:
    """Yield the messages from `at` on, which is outside messages; those behind a call only if its end is a tag."""
    while at < len(text):
        tag = _STOP.search(text, at + len(START) if text.startswith(START, at) else at)
        stop, kind = (tag.start(), tag.group()) if tag else (len(text), "")
        start = _find_header(text, at, stop, kind)
        body = end = after = stop if kind in ("", START) else stop + len(kind)
        if kind == MESSAGE:
            found = _END.search(text, body)
            end, after = (found.start(), found.end()) if found else (len(text), len(text))
        yield HarmonyMessage(at, start, stop, kind, text[start:stop], body, end, after)
        at = after


def count_settled(text: str, at: int = 0) -> int:
    """
    Return how many characters of an unfinished turn begin its content: all up to a message that may be a call.

    No message before `at`, which is outside messages, is a call.
    """
    message = None
    for message in read_messages(text, at):
        if message.is_call:
            return message.start
    return len(text) if message is None or message.tag else _find_unfinished_header(text, message.first)


class HarmonyReasoning:
    """Takes the messages of the channel `analysis` as reasoning, and all others as the rest, without their headers."""

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the rest, each with a line break between messages."""
        reasoning: list[str] = []
        rest: list[str] = []
        for message in read_messages(text):
            rest.append(text[message.first : message.start])
            (reasoning if message.is_reasoning else rest).append(text[message.body : message.end])
        return _join(reasoning), _join(rest)

    def settled(self, text: str) -> tuple[str, str]:
        """Return how the two parts of an unfinished text begin, however the text continues."""
        *_, message = (None, *read_messages(text))
        if message is None:
            return "", ""
        if not message.tag:
            return self.split(text[: _find_unfinished_header(text, message.first)])
        if message.tag == MESSAGE and message.after == len(text) and message.end == len(text):
            return self.split(text[: len(text) - max(overlap(text, tag) for tag in ENDS)])
        return self.split(text)


def _find_header(text: str, first: int, stop: int, tag: str) -> int:
    """Return the index of the header in the text before a tag; `stop` if the text is no header."""
    mark = _MARK.search(text, first, stop)
    recipient = text.find(_RECIPIENT, first, stop)
    # Prose may hold `to=`: without any tag it is a recipient only in the header of a message.
    if recipient < 0 or not (mark or tag in (MESSAGE, CALL)):
        return mark.start() if mark else stop
    recipient = first + len(text[first:recipient].rstrip())
    return min(recipient, mark.start()) if mark else recipient


def _find_unfinished_header(text: str, first: int) -> int:
    """Return the index from which the end of an unfinished turn, outside messages, may be a header."""
    header = _find_header(text, first, len(text), CALL)
    if header < len(text):
        return header
    end = text[first:]
    mark = len(text) - max(overlap(end, each) for each in (*_MARKS, MESSAGE, *ENDS))
    recipient = len(text) - overlap(end, _RECIPIENT)
    return min(mark, first + len(text[first:recipient].rstrip()))


def _join(parts: list[str]) -> str:
    return "\n".join(part for part in parts if part.strip())
