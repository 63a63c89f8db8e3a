"""
The texts of an episode as attributes of its spans, in the JSON that OpenTelemetry's conventions for generative AI ask.

The conversation of the result is their only source, so events stay small. It names no turns and calls: its messages
belong to them by their order. Where their numbers differ, as in an episode that was resumed, only the episode's span
has texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from turnwise.types import Message
from turnwise_observability.timeline import EpisodeTimeline

Attributes = Mapping[str, str]


@frozen
class TurnTexts:
    """Texts of a turn's generate call, and of each of its tool calls in the order of their starts."""

    generate: Attributes = field(factory=dict)
    tools: Sequence[Attributes] = ()


@frozen
class EpisodeTexts:
    """Texts of an episode's own span, and of its turns; no turns if messages and turns do not correspond."""

    episode: Attributes = field(factory=dict)
    turns: Sequence[TurnTexts] = ()


@frozen
class SpanTexts:
    """
    Makes the attributes.

    Attributes:
        limit: most characters of one text; a longer one is cut, and a mark has the number of missing characters.
    """

    limit: int

    def of(self, timeline: EpisodeTimeline) -> EpisodeTexts:
        """Return the texts of an episode; none before it has ended."""
        messages = timeline.result.messages if timeline.result is not None else ()
        num_given = sum(message.get("role") == "assistant" for message in timeline.start.task.messages)
        answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"][num_given:]
        if not answers:
            return EpisodeTexts({"gen_ai.input.messages": self._list(messages)} if messages else {})
        num_calls = [len(tools) for _turn, tools in timeline.turns_with_tools()]
        if len(num_calls) != len(answers):
            first = answers[0]
            return EpisodeTexts(self._input_and_output(messages[:first], messages[first:]))
        starts, ends = [0, *(index + 1 for index in answers)], [*answers, len(messages)]
        between = [messages[start:end] for start, end in zip(starts, ends, strict=True)]
        turns = [
            TurnTexts(
                self._input_and_output(between[number], [messages[answer]]),
                self._tools(messages[answer], between[number + 1], num_calls[number]),
            )
            for number, answer in enumerate(answers)
        ]
        return EpisodeTexts(self._input_and_output(between[0], [messages[answers[-1]]]), turns)

    def _input_and_output(self, given: Sequence[Message], written: Sequence[Message]) -> Attributes:
        return {"gen_ai.input.messages": self._list(given), "gen_ai.output.messages": self._list(written)}

    def _tools(self, answer: Message, after: Sequence[Message], num_calls: int) -> Sequence[Attributes]:
        """Return the arguments and results of a turn's calls."""
        calls = answer.get("tool_calls") or ()
        results = [message for message in after if message.get("role") == "tool"]
        found: list[dict[str, str]] = [{} for _ in range(num_calls)]
        if len(calls) == num_calls:
            for attributes, call in zip(found, calls, strict=True):
                attributes["gen_ai.tool.call.arguments"] = self._cut(_plain(_function(call).get("arguments")))
        if len(results) == num_calls:
            for attributes, result in zip(found, results, strict=True):
                attributes["gen_ai.tool.call.result"] = self._cut(_plain(result.get("content")))
        return found

    def _list(self, messages: Sequence[Message]) -> str:
        shown = [{"role": message.get("role", ""), "parts": self._parts(message)} for message in messages]
        return _encodable(json.dumps(shown, ensure_ascii=False, default=str))

    def _parts(self, message: Message) -> list[dict[str, Any]]:
        content = message.get("content")
        if message.get("role") == "tool":
            call = {"id": message["tool_call_id"]} if "tool_call_id" in message else {}
            return [{"type": "tool_call_response", **call, "response": self._cut(_plain(content))}]
        pieces = content if isinstance(content, list | tuple) else [content]
        parts = [self._part(piece) for piece in pieces if piece]
        for call in message.get("tool_calls") or ():
            function = _function(call)
            arguments = self._cut(_plain(function.get("arguments")))
            named = {"id": call["id"]} if "id" in call else {}
            parts.append({"type": "tool_call", **named, "name": function.get("name", ""), "arguments": arguments})
        return parts

    def _part(self, piece: object) -> dict[str, Any]:
        """Return a text; of a picture or another medium, the type alone."""
        if isinstance(piece, Mapping) and "text" not in piece:
            return {"type": str(piece.get("type", "unknown"))}
        text = piece["text"] if isinstance(piece, Mapping) else piece
        return {"type": "text", "content": self._cut(str(text))}

    def _cut(self, text: str) -> str:
        missing = len(text) - self.limit
        return _encodable(text if missing <= 0 else f"{text[: self.limit]}[{missing} characters cut]")


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, object] = call.get("function") or {}
    return function


def _encodable(text: str) -> str:
    """Return a text that the protocol can carry: lone surrogates, which a tool may return, become question marks."""
    return text.encode(errors="replace").decode()


def _plain(value: object) -> str:
    """Return a text as it is, and another value as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
