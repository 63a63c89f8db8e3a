"""
Proof that a prompt shows each of its messages.

Templates leave messages out without an error: a second system message, a role that they do not know, the calls of
earlier turns, tools. A model that never saw a rule is trained to break it. So each form of a conversation is rendered
once with a mark in each message, and every mark must be in the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import define, field

from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema
from turnwise_chat_templates.picture_parts import shape_of, texts_of
from turnwise_chat_templates.probe import Plain
from turnwise_chat_templates.render import Renderer

_MAX_FORMS: Final = 512
_NONE: Final = "None"
_WRITE_TOOLS: Final = "`chat: {name: jinja, tools: system_prompt}` writes them into the system prompt"


@define(eq=False)
class ShownMessages:
    """
    Proves that a template shows the messages of a prompt, once for each form of a conversation.

    The form is all but the texts: roles, keys, and how many calls each message has.
    """

    renderer: Renderer
    _proven: dict[object, str] = field(factory=dict, init=False)

    def find_hidden(self, messages: Sequence[Plain], tools: Sequence[ToolSchema], text: str) -> str:
        """
        Return the reason why a prompt does not show its messages or tools; "" if it shows all.

        Args:
            messages: plain messages, as the template gets them.
            tools: their schemas.
            text: the rendered prompt.
        """
        form = (tuple(map(_form_of, messages)), bool(tools))
        known = self._proven.get(form)  # one operation: other threads render prompts too
        if known is not None:
            return known
        try:
            reason = self._prove(messages, tools)
        except TemplateError:  # it takes these texts, and not the marks: then the texts themselves must be there
            return _first_hidden(messages, [_own_texts(message) for message in messages], text)
        if len(self._proven) >= _MAX_FORMS:
            self._proven.clear()
        self._proven[form] = reason
        return reason

    def _prove(self, messages: Sequence[Plain], tools: Sequence[ToolSchema]) -> str:
        marked = [_with_marks(message, index) for index, message in enumerate(messages)]
        plain, marks = [message for message, _marks in marked], [marks for _message, marks in marked]
        text = self.renderer.render(plain, tools)
        if hidden := _first_hidden(messages, marks, text):
            return hidden
        if tools and text == self.renderer.render(plain):
            return f"tools are not shown; {_WRITE_TOOLS}"
        empty = [{**message, "content": message["content"] or ""} for message in plain]
        if empty != plain and text.count(_NONE) > self.renderer.render(empty, tools).count(_NONE):
            return "an empty content is shown as the word None"
        return ""


def name_message(messages: Sequence[Message], index: int) -> str:
    """Return the place of a message and its role, for error texts."""
    return f"messages[{index}] (role {messages[index].get('role')!r})"


def _first_hidden(messages: Sequence[Plain], texts: Sequence[Sequence[tuple[str, str]]], shown: str) -> str:
    for index, wanted in enumerate(texts):
        for place, text in wanted:
            if text not in shown:
                return f"{name_message(messages, index)}: {place} is not shown"
    return ""


def _form_of(message: Plain) -> object:
    """Return all of a message that decides how a template renders it, but not its texts."""
    content, calls = message.get("content"), message.get("tool_calls") or ()
    kind: object = "text" if content else repr(content)
    kind = shape_of(message) or kind
    return message.get("role"), tuple(sorted(message)), kind, tuple(map(_has_text_arguments, calls))


def _has_text_arguments(call: object) -> bool | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function.get("arguments"), str) if isinstance(function, Mapping) else None


def _with_marks(message: Plain, index: int) -> tuple[Plain, list[tuple[str, str]]]:
    """Return a message with a mark for each text, and (place, mark) of each mark."""
    marked = dict(message)
    marks: list[tuple[str, str]] = []
    if isinstance(content := message.get("content"), list):
        marked["content"] = [
            {**part, "text": f"tw7m{index}p{number}x"} if part.get("text") else part
            for number, part in enumerate(content)
        ]
        marks.extend(("the content", text) for text in texts_of(marked) if text)
    elif content:
        marked["content"] = f"tw7m{index}x"
        marks.append(("the content", marked["content"]))
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_with_mark(call, f"tw7m{index}c{number}x") for number, call in enumerate(calls)]
        readable = (number for number, call in enumerate(calls) if _has_text_arguments(call) is not None)
        marks.extend((f"call {number}", f"tw7m{index}c{number}x") for number in readable)
    return marked, marks


def _with_mark(call: Any, mark: str) -> Any:
    as_text = _has_text_arguments(call)
    if as_text is None:
        return call
    arguments: object = {"mark": mark}
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments) if as_text else arguments}}


def _own_texts(message: Plain) -> list[tuple[str, str]]:
    """Return (place, text) of what the prompt must hold, if a template refuses marks."""
    return [("the content", text.strip()) for text in texts_of(message)]
