"""Reads a sampled turn: its text, reasoning and tool calls, as the client gets them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

from attrs import define, field, frozen

from turnwise import Chat, FinishReason, GenerateResult, Message, ToolCall, ToolParser
from turnwise.messages import format_arguments, name_call
from turnwise.types import TokenArray
from turnwise_gateway.calls import CallOfTool, Finish, ModelCall
from turnwise_gateway.session.drafts import GrowingText, Settle, TurnDraft, find_settling_parser
from turnwise_gateway.tree.messages import Split

_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH: Final = 9
"""Some chat templates accept no other length."""
_UNREADABLE: Final = "malformed_call"
"""Name of a call whose name cannot be read: clients refuse an empty one, and no tool has this one."""


@frozen(kw_only=True)
class ReadTurn:
    """
    A turn as text.

    Attributes:
        content: without reasoning, calls and stop string.
        reasoning: text of the reasoning.
        tool_calls: with ids.
        finish: reason for the end of the turn.
        stop: stop string that ended the turn, if one did.
        num_reasoning_tokens: tokens from the start of the turn to the end of the reasoning.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[CallOfTool, ...] = ()
    finish: Finish = "stop"
    stop: str | None = None
    num_reasoning_tokens: int = 0

    @property
    def message(self) -> Message:
        """The turn as a message of the conversation."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@define(eq=False)
class CallIds:
    """Ids of tool calls: nine letters and digits, unique in a session, the same in every run."""

    _used: set[str] = field(factory=set, init=False)

    def assign(self, record_name: str, turn: int, index: int) -> str:
        """
        Return the id of a call.

        Args:
            record_name: of the record, independent of the order of calls; empty for the record of the task itself.
            turn: number of the turn in its record, from 1.
            index: of the call in its turn, from 0.
        """
        # The form of `tool_agent`, so that a template that shows ids renders the same tokens for the same conversation.
        call_id, attempt = name_call(turn, index), 0
        while record_name or len(call_id) != _ID_LENGTH or call_id in self._used:
            name = f"{record_name}|{turn}|{index}|{attempt}".encode()
            number, attempt = int.from_bytes(blake2b(name, digest_size=8).digest(), "big"), attempt + 1
            call_id = "".join(_DIGITS[number // 36**place % 36] for place in range(_ID_LENGTH))
            if call_id not in self._used:
                break
        self._used.add(call_id)
        return call_id


@frozen(kw_only=True)
class TurnReader:
    """
    Reads turns with the parsers of the run.

    Attributes:
        chat: decodes ids.
        parser: finds tool calls; None in a run without one.
        split: splits the reasoning from a text; None leaves it in the content.
        settle: the same for an unfinished text; None if the reasoning parser has nothing for it.
        keeps_malformed: a malformed call is a call, and not text.
    """

    chat: Chat
    parser: ToolParser | None = None
    split: Split | None = None
    settle: Settle | None = None
    keeps_malformed: bool = False

    def read(self, result: GenerateResult, call: ModelCall, assign_id: Callable[[int], str]) -> ReadTurn:
        """Return the text and the calls of a turn; `assign_id` gives the id of a call by its index."""
        text, calls = self._parse(result.token_ids, call)
        reasoning, content = ("", text) if self.split is None else self.split(text)
        stop = result.stop_reason if isinstance(result.stop_reason, str) else None
        if stop is not None and stop in content:
            content = content[: content.rindex(stop)]  # the last token may reach beyond the stop string
        finish: Finish = "length" if result.finish_reason is FinishReason.LENGTH else "stop"
        return ReadTurn(
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(_openai_call(each, assign_id(index)) for index, each in enumerate(calls)),
            finish="tool_calls" if calls and finish == "stop" else finish,
            stop=stop,
            num_reasoning_tokens=self._count_reasoning(result.token_ids, reasoning),
        )

    def draft(self, call: ModelCall, stops: Sequence[str]) -> TurnDraft | None:
        """Return a reader of a turn that is being sampled; None if a parser does not report the decided part."""
        parser = find_settling_parser(self.parser) if self._parses(call) else None
        if (parser is None and self._parses(call)) or (self.split is not None and self.settle is None):
            return None
        return TurnDraft(GrowingText(self.chat), parser, self.settle, stops)

    def token_texts(self, token_ids: TokenArray) -> tuple[str, ...]:
        """Return the text of each id."""
        return tuple(self.chat.tokenizer.decode([int(token_id)]) for token_id in token_ids)

    def _parses(self, call: ModelCall) -> bool:
        return self.parser is not None and bool(call.tools) and call.tool_choice != "none"

    def _parse(self, token_ids: TokenArray, call: ModelCall) -> tuple[str, Sequence[ToolCall]]:
        """Return the text and the calls of a turn; a turn with a malformed call may be all text, as in other APIs."""
        if self.parser is not None and self._parses(call):
            text, calls = self.parser.parse(token_ids)
            if self.keeps_malformed or not any(each.error for each in calls):
                return text, calls
        return self.chat.text(token_ids), ()

    def _count_reasoning(self, token_ids: TokenArray, reasoning: str) -> int:
        if not reasoning:
            return 0
        decode = self.chat.tokenizer.decode
        end = decode(token_ids).find(reasoning) + len(reasoning)
        return bisect_left(range(len(token_ids)), end, key=lambda num_tokens: len(decode(token_ids[:num_tokens])))


def _openai_call(call: ToolCall, call_id: str) -> CallOfTool:
    return CallOfTool(id=call_id, name=call.name or _UNREADABLE, arguments=format_arguments(call))
