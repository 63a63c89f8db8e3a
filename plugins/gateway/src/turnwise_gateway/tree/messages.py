"""
The normal form of a message, by which the echo of a turn is recognised.

Clients send back the turns of the model in changed forms: they write the JSON of a call again, drop its reasoning, trim
its text. A record holds what was sampled, so an echo only has to identify its turn. Two messages are the same if their
normal forms are; each difference that the normal form ignores is a tolerance with a name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Final

from attrs import evolve, frozen

from turnwise import Message
from turnwise.types import ToolSchema
from turnwise_gateway.contents import PartsKey, build_content, is_readable, parts_key
from turnwise_gateway.tree.text_calls import split_calls
from turnwise_strict_json import read_float

Defaults = Mapping[str, Mapping[str, str]]
"""The arguments of each tool that have a default value, and that value as JSON."""
NO_DEFAULTS: Final[Defaults] = MappingProxyType({})
Split = Callable[[str], tuple[str, str]]
"""Returns the reasoning and the rest of a turn's text."""
NamedCalls = tuple[tuple[str, str], ...]
"""The name of each call, and its arguments as JSON."""
ReadCalls = Callable[[str, Sequence[ToolSchema]], tuple[str, NamedCalls]]
"""Returns the text outside the calls and the calls of a text, read with these tools; no calls if there are none."""

TOLERANCES: Final = (
    "null_content",
    "arguments",
    "reasoning_dropped",
    "reasoning_repeated",
    "text_dropped",
    "whitespace",
    "empty_message",
    "stop_string",
    "think_text",
    "calls_as_text",
    "calls_apart",
)
"""Names of the differences that an echo may have; see the README of this package."""

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_OPEN, _CLOSE = "<think>", "</think>"
_MAX_EXACT: Final = 2**53
"""Below it every whole number is a double, so that `1.0` and `1` have the same value in every client."""


class JoinedTurn(dict[str, Any]):
    """A message whose calls a client has sent in several ones; see `turnwise_gateway.tree.joined_turns`."""


@frozen
class NormalForm:
    """
    A message as it is compared.

    Attributes:
        role: of the message; `developer` is `system`.
        text: without reasoning and outer whitespace.
        calls: name and arguments of each tool call; arguments as JSON with sorted keys.
        reasoning: without outer whitespace; empty when the message has none. It is compared apart from the rest,
            because clients may leave it out.
        has_text_calls: the calls were read from the text, so their order may be another one.
        parts: texts and pictures of a content with pictures, whose `text` is empty.
    """

    role: str
    text: str
    calls: NamedCalls = ()
    reasoning: str = ""
    has_text_calls: bool = False
    parts: PartsKey = ()

    @property
    def key(self) -> tuple[object, ...]:
        """All that must be equal."""
        return (self.role, self.text, self.calls, self.parts)

    def echoes(self, own: NormalForm) -> bool:
        """Return whether this is the form of an echo of a message with another form; reasoning does not count."""
        if self.has_text_calls and not own.has_text_calls:
            return (self.role, self.text, sorted(self.calls)) == (own.role, own.text, sorted(own.calls))
        return self.key == own.key

    def echoes_calls(self, own: NormalForm) -> bool:
        """Return whether this is the form of an echo that has the calls of a message, and nothing of its text."""
        return bool(self.calls) and (self.role, self.text, self.calls) == (own.role, "", own.calls)

    def without_copies(self, own: NormalForm) -> NormalForm:
        """Return the form of the message without calls whose arguments are copies from the text of another message."""
        if not self.has_text_calls or own.calls:
            return self
        text = "".join(own.text.split())
        copied = ("".join(arguments.split()) for _, arguments in self.calls)
        return evolve(self, calls=(), has_text_calls=False) if all(each and each in text for each in copied) else self

    def without_end(self, end: str) -> NormalForm:
        """Return the form of the message without the end of its text."""
        return evolve(self, text=self.text.removesuffix(end).strip())

    def may_rewrite(self, own: NormalForm) -> bool:
        """Return whether calls may be in another order: not those in fields, whose results may have no ids."""
        return not (self.calls and own.calls) or self.has_text_calls or own.has_text_calls

    @property
    def is_empty_turn(self) -> bool:
        """Whether it is an assistant message without text and calls, as clients add after a broken stream."""
        return self.role == "assistant" and not self.text and not self.calls


def split_think(text: str) -> tuple[str, str]:
    """Return the reasoning between ``<think>`` tags at the start, and the rest; the first tag may be missing."""
    before, found, rest = text.partition(_CLOSE)
    opening, _, inside = before.partition(_OPEN)
    if not found or (_OPEN in before and opening.strip()):
        return "", text
    return (inside if _OPEN in before else before), rest


def call_ids(messages: Sequence[Message]) -> Iterable[str]:
    """Yield the ids of calls, the last first."""
    for message in reversed(messages):
        if message.get("tool_call_id"):
            yield message["tool_call_id"]
        yield from (call["id"] for call in reversed(message.get("tool_calls") or ()) if call.get("id"))


def is_plain(message: Message) -> bool:
    """Return whether a message of a data set has the form that `normalise` reads."""
    if not is_readable(message.get("content")):
        return False
    texts = [message["role"], message.get("reasoning_content") or ""]
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        texts += [function.get("name"), function.get("arguments")] if isinstance(function, Mapping) else [None]
    return all(isinstance(text, str) for text in texts)


def normalise(message: Message, split: Split = split_think, defaults: Defaults = NO_DEFAULTS) -> NormalForm:
    """
    Return the normal form of a message in the form of Chat Completions, with a content of `turnwise_gateway.contents`.

    Args:
        message: any.
        split: splits the reasoning from a text.
        defaults: left out of the arguments of calls, since some clients add them to the echo.
    """
    role = message["role"]
    role = "system" if role == "developer" else role
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = build_content(text, "\n")
        if not isinstance(text, str):
            return NormalForm(role, "", parts=parts_key(text))
    if role != "assistant":
        return NormalForm(role, text.strip())
    reasoning, rest = split(text)
    reasoning = (message.get("reasoning_content") or "").strip() or reasoning.strip()
    listed = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    from_text: NamedCalls = ()
    if not listed:
        rest, from_text = split_calls(rest)
    return NormalForm(role, rest.strip(), _normalise_calls(listed or from_text, defaults), reasoning, bool(from_text))


def normalise_written(
    form: NormalForm, read_calls: ReadCalls, tools: Sequence[ToolSchema], defaults: Defaults = NO_DEFAULTS
) -> NormalForm:
    """Return the form of a message with the calls that its text has in the format of a parser; they have no order."""
    text, calls = (form.text, form.calls) if form.calls else read_calls(form.text, tools)
    # A call that is taken out of a text leaves the white space around it.
    words, ordered = " ".join(text.split()), tuple(sorted(_normalise_calls(calls, defaults)))
    return evolve(form, text=words, calls=ordered, has_text_calls=True)


def _normalise_calls(calls: Iterable[tuple[str, str]], defaults: Defaults) -> NamedCalls:
    return tuple((name, normalise_arguments(arguments, defaults.get(name, _NONE))) for name, arguments in calls)


def normalise_arguments(text: str, defaults: Mapping[str, str] = _NONE) -> str:
    """Return the JSON of a call with sorted keys, no spaces, no defaults and `1.0` as `1`; any other text trimmed."""
    try:
        value = _DECODER.decode(text)
        if defaults and isinstance(value, dict):
            value = {name: each for name, each in value.items() if _ENCODER.encode(each) != defaults.get(name)}
        return _ENCODER.encode(value)
    except (ValueError, RecursionError):
        return text.strip()


def read_defaults(tools: Iterable[Any]) -> dict[str, dict[str, str]]:
    """Return the default values in the schemas of tools."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools:
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            if isinstance(schema, dict) and "default" in schema:
                text = json.dumps(schema["default"])
                found.setdefault(function["name"], {})[name] = normalise_arguments(text)
    return found


def name_tolerances(
    own: Message, echo: Message, split: Split = split_think, *, is_written: bool = False
) -> frozenset[str]:
    """
    Return the names of the differences between two messages.

    Args:
        own: as the client got it, or first sent it.
        echo: as the client sends it now; `agree` holds for the two, perhaps with a stop string.
        split: as for `normalise`.
        is_written: the two agree only in the forms of `normalise_written`.
    """
    found = {"calls_apart"} if isinstance(echo, JoinedTurn) else set()
    content, echoed = own.get("content"), echo.get("content")
    if is_written:
        found.add("calls_as_text")
        content = echoed = None
    elif not isinstance(content or echoed or "", str):  # pictures, of which only the texts beside them may differ
        return frozenset() if content == echoed else frozenset({"whitespace"})
    elif not echo.get("tool_calls") and (own.get("tool_calls") or content != echoed):
        text, copies = split_calls(echoed or "")  # of calls, or of code: see `NormalForm.without_copies`
        if copies or own.get("tool_calls"):
            found.add("calls_as_text")
            echoed = text
    if content != echoed:
        if not content and not echoed:
            found.add("null_content")
        else:
            has_calls = bool(own.get("tool_calls") and echo.get("tool_calls"))
            found |= _name_text_tolerances(content or "", echoed or "", split, has_calls=has_calls)
    if "calls_as_text" not in found and _arguments(own) != _arguments(echo):
        found.add("arguments")
    kept = echo.get("reasoning_content") or ""
    return frozenset(found | _name_reasoning_tolerances(own.get("reasoning_content") or "", kept, found))


def _name_reasoning_tolerances(reasoning: str, kept: str, others: Set[str]) -> set[str]:
    if reasoning and not kept and "think_text" not in others:
        return {"reasoning_dropped"}
    if repeats_reasoning(kept.strip(), reasoning.strip()):
        return {"reasoning_repeated"}
    if kept and reasoning != kept:
        return {"whitespace" if reasoning else "think_text"}
    return set()


def repeats_reasoning(echoed: str, reasoning: str) -> bool:
    """
    Return whether an echo has a turn's reasoning twice; both without outer whitespace.

    LiteLLM adds the whole reasoning to a stream of Messages when its signature comes, behind the parts.
    """
    size = len(reasoning)
    between = echoed[size : len(echoed) - size]
    return 0 < 2 * size <= len(echoed) and echoed == reasoning + between + reasoning and not between.strip()


def tools_key(tools: Iterable[object]) -> str:
    """Return a text that is equal for equal lists of tool schemas, whatever the order of keys."""
    return sys.intern(json.dumps(list(tools), sort_keys=True))  # one object for all sessions with these tools


def _name_text_tolerances(text: str, echoed: str, split: Split, *, has_calls: bool) -> set[str]:
    found = set()
    (reasoning, rest), (kept, rest_kept) = split(text), split(echoed)
    if rest.strip() and has_calls and not echoed.strip():
        return {"text_dropped", *(("reasoning_dropped",) if reasoning.strip() else ())}
    if bool(reasoning.strip()) != bool(kept.strip()):
        found.add("think_text" if kept.strip() else "reasoning_dropped")
    if rest.strip() != rest_kept.strip():
        found.add("stop_string")
    elif not found:
        found.add("whitespace")
    return found


def _arguments(message: Message) -> list[str]:
    return [call["function"]["arguments"] for call in message.get("tool_calls") or ()]


def _read_number(text: str) -> float | int:
    number = read_float(text)  # two numbers that no float can hold would be equal
    return int(number) if number.is_integer() and abs(number) < _MAX_EXACT else number


# Made once: `json.loads` and `json.dumps` make new ones for each call that has options.
_DECODER: Final = json.JSONDecoder(parse_float=_read_number)
_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
