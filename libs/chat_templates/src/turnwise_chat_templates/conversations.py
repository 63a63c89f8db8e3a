"""
A comparison of a real conversation with the chat template's rendering of the whole.

The proof of a delta (see `delta.py`) uses short probe conversations. A template may have rules by the length of a
content or by the number of messages, which these do not reach. So one conversation in some is rendered as a whole,
with its real texts, up to each of some messages, and the text after the last turn of the model must be the delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from attrs import frozen

from turnwise.errors import DataError, TemplateError
from turnwise.types import Message, ToolSchema
from turnwise_chat_templates.delta import DeltaTemplate
from turnwise_chat_templates.probe import TURN_MARK, Plain, excerpt, with_answer_keys
from turnwise_chat_templates.render import Renderer

MAX_BLOCKS: Final = 32
"""New messages that are compared in one conversation, for each costs a rendering of the whole."""


@frozen
class Block:
    """
    New messages of a conversation behind a turn of the model.

    Attributes:
        start, stop: indexes of the messages.
        num_chars: in the texts of the messages and of the turn.
    """

    start: int
    stop: int
    num_chars: int


@frozen
class ConversationCheck:
    """
    Compares conversations with their renderings.

    Attributes:
        renderer: of the template.
        plain: returns messages as the template gets them.
        template: returns the delta of messages; `TemplateError` if there is none.
        suffix: returns the text that a delta appends for messages.
    """

    renderer: Renderer
    plain: Callable[[Sequence[Message]], list[Plain]]
    template: Callable[[Sequence[Message]], DeltaTemplate]
    suffix: Callable[[DeltaTemplate, Sequence[Message]], str]

    def find_difference(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str | None:
        """Return the first difference; "" if there is none, and None if no part of the conversation can be compared."""
        compared = False
        for block in choose_blocks(messages):
            try:
                found = self._compare(messages, block, tools)
            except (TemplateError, DataError, AttributeError, KeyError, TypeError):
                continue  # the template takes a turn in no form, such as one with a malformed call
            compared = True
            if found:
                return f"messages[{block.start}:{block.stop}] of {len(messages)}: {found}"
        return "" if compared else None

    def _compare(self, messages: Sequence[Message], block: Block, tools: Sequence[ToolSchema]) -> str:
        new = messages[block.start : block.stop]
        template = self.template(new)
        if tools and template.moves_tools:
            raise TemplateError(template.moves_tools)
        expected = self.suffix(template, new)
        before, answers = self.plain(messages[: block.start - 1]), with_answer_keys(self.plain(new))
        error = TemplateError("no form of the turn was tried")
        for turn in self._turns(template, messages[block.start - 1], answers):
            for shown in (tools, ()) if tools else ((),):
                try:
                    whole = self.renderer.render([*before, turn, *answers], shown)
                    suffix = template.behind_end(whole.rpartition(TURN_MARK)[2])
                except TemplateError as refusal:
                    error = refusal
                else:
                    return "" if suffix == expected else excerpt(suffix, expected)
        raise error

    def _turns(self, template: DeltaTemplate, turn: Message, answers: Sequence[Plain]) -> Iterator[Plain]:
        """Yield forms of the turn before new messages, with a mark at its end: with its own text, and without."""
        marked = template.turn.message(answers)
        content = self.plain([{"role": "assistant", "content": turn.get("content")}])[0]["content"]
        if content and template.turn.content:
            yield {**marked, "content": content + TURN_MARK}
        yield marked


def choose_blocks(messages: Sequence[Message]) -> list[Block]:
    """Return the new messages to compare: the first, the last, those with the longest texts, and some in between."""
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    ends = [*turns, len(messages)][1:]
    sizes = [_count_chars(message) for message in messages]
    blocks = [
        Block(turn + 1, end, sum(sizes[turn:end])) for turn, end in zip(turns, ends, strict=True) if end > turn + 1
    ]
    if len(blocks) <= MAX_BLOCKS:
        return blocks
    longest = sorted(range(len(blocks)), key=lambda index: -blocks[index].num_chars)[: MAX_BLOCKS // 2]
    spread = [round(index * (len(blocks) - 1) / (MAX_BLOCKS // 2 - 1)) for index in range(MAX_BLOCKS // 2)]
    return [blocks[index] for index in sorted({*longest, *spread})]


def _count_chars(message: Mapping[str, object]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0
