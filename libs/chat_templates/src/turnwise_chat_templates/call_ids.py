"""
The ids of calls in a chat template: which ones it takes, and its form for them, if it has one.

Most templates show no ids. Mistral's show any that has nine letters and digits. Kimi's shows the id of a call in the
place of its name, so the id must hold the name: `functions.add:0`, with a number that counts the calls of the
conversation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

from attrs import define

from turnwise.errors import DataError, TemplateError
from turnwise.messages import UNNAMED_CALL
from turnwise.types import Message, ToolSchema
from turnwise_chat_templates.probe import BASE, Plain
from turnwise_chat_templates.render import Renderer

_NAME: Final = "tw7name"
_FIRST, _OTHER, _ODD = "tw7id0001", "tw7id0002", "tw7 id"
_FORMS: Final = (("", {"word": "tw7"}), (None, {"word": "tw7"}), ("", '{"word": "tw7"}'))
"""Content and arguments of a call, as templates want them."""
_TOOL: Final[ToolSchema] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}},
    },
}
_PLAIN_NAME: Final = re.compile(r"[\w.\-]{1,128}")


@define(eq=False, slots=False)
class CallIdRules:
    """
    The rules of a template for the ids of calls, found with probe conversations when they are first needed.

    Attributes:
        renderer: of the template.
        guard: treats the special tokens in a message.
    """

    renderer: Renderer
    guard: Callable[[Any], Any]

    @cached_property
    def hold_names(self) -> bool:
        """The template shows the id of a call, and its name only there."""
        # Without the tools, and without the result: both show the name too.
        text = self._render(_FIRST, _NAME, with_tool=False)
        return _FIRST in text and _NAME not in text

    def take(self, call_id: str, tool: str) -> bool:
        """Return whether the template shows a call with this id and its result, or shows no ids at all."""
        if not self._matter:
            return True
        try:
            return bool(self._render(call_id, tool))
        except DataError:
            return False

    def write(self, tool: str, number: int) -> str:
        """Return an id in the template's own form, for the call with a number, from 0; empty if it has no form."""
        if not self.hold_names:
            return ""
        return f"functions.{tool if _PLAIN_NAME.fullmatch(tool) else UNNAMED_CALL}:{number}"

    def rename(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose ids hold the names of their tools, if the template would lose the names otherwise."""
        named = [message for message in messages if message.get("tool_calls")]
        if not named or not self.hold_names:
            return messages
        waiting: dict[object, list[str]] = {}
        renamed: list[Message] = []
        taken = {call.get("id") for message in named for call in message["tool_calls"]}
        number = 0
        for message in messages:
            if calls := message.get("tool_calls"):
                written = []
                waiting |= {call.get("id"): [] for call in calls}
                for call in calls:
                    call_id, number = self._rename_call(call, number, taken), number + 1
                    waiting[call.get("id")].append(call_id)
                    written.append({**call, "id": call_id})
                renamed.append({**message, "tool_calls": written})
                continue
            ids = waiting.get(message.get("tool_call_id")) if message.get("role") == "tool" else None
            if ids:
                # Several calls may share an id; their results are in the order of the calls.
                renamed.append({**message, "tool_call_id": ids.pop(0) if len(ids) > 1 else ids[0]})
            else:
                renamed.append(message)
        return renamed

    def _rename_call(self, call: Any, number: int, taken: set[object]) -> str:
        call_id, function = call.get("id"), call.get("function") or {}
        name = str(function.get("name") or "")
        if isinstance(call_id, str) and name and name in call_id:
            return call_id
        while (written := self.write(name, number)) in taken:
            number += 1
        taken.add(written)
        return written

    @cached_property
    def _matter(self) -> bool:
        """The template shows ids, or refuses some."""
        first = self._render(_FIRST, _NAME)
        return bool(first) and (first != self._render(_OTHER, _NAME) or not self._render(_ODD, _NAME))

    def _render(self, call_id: str, tool: str, *, with_tool: bool = True) -> str:
        """Return the text of a conversation with a call and its result; empty if the template refuses it."""
        shown: tuple[tuple[ToolSchema, ...], ...] = ((_TOOL,), ()) if with_tool else ((),)
        for (content, arguments), schemas in itertools.product(_FORMS, shown):
            call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}
            turn: Plain = {"role": "assistant", "content": content, "tool_calls": [call]}
            result: Plain = {"role": "tool", "tool_call_id": call_id, "name": tool, "content": "tw7"}
            messages = (*BASE, turn, result) if with_tool else (*BASE, turn)
            try:
                return self.renderer.render(map(self.guard, messages), schemas)
            except TemplateError:
                continue
        return ""
