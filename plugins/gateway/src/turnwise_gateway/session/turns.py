"""Reads a sampled turn: its text, reasoning and tool calls, as the client gets them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from turnwise import Chat, GenerateResult, Message, ToolCall, ToolParser
from turnwise.messages import UNNAMED_CALL, format_arguments
from turnwise.naming import candidate_ids, ids_of_calls, sampled_id
from turnwise.task_tools import parse_turn
from turnwise.types import TokenArray
from turnwise_gateway.calls import CallOfTool, Finish, ModelCall
from turnwise_gateway.session.drafts import GrowingText, Settle, TurnDraft, find_settling_parser
from turnwise_gateway.tree.messages import Split


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
    """
    Ids of tool calls, the same in every run: as the model sampled them, or new and unique in a session.

    A client finds the result of a call by its id. So an id that the model writes twice in a conversation is replaced
    for the client, and `sampled` brings it back for the prompt.

    Attributes:
        chat: the chat template.
        sampled: the id that the model wrote, by the id that the client has instead.
    """

    chat: Chat
    sampled: dict[str, str] = field(factory=dict, init=False)
    _used: set[str] = field(factory=set, init=False)

    def assign(
        self, calls: Sequence[ToolCall], messages: Sequence[Message], *, record_name: str, turn: int
    ) -> list[str]:
        """
        Return the ids of the calls of a turn.

        Args:
            calls: in order.
            messages: of the conversation, as the client sent them.
            record_name: of the record, independent of the order of calls; empty for the record of the task itself.
            turn: number of the turn in its record, from 1.
        """
        before = list(ids_of_calls(messages))
        known = set(before)
        assigned: list[str] = []
        for index, call in enumerate(calls):
            call_id = written = sampled_id(call, self.chat)
            if call_id is None or call_id in known:
                number = len(before) + index
                candidates = candidate_ids(
                    call.name, self.chat, turn=turn, index=index, number=number, place=record_name
                )
                taken = {*known, *self._used, *(each.id for each in calls)}
                call_id = next(name for name in candidates if name not in taken)
                if written is not None:
                    self.sampled[call_id] = written
            known.add(call_id)
            self._used.add(call_id)
            assigned.append(call_id)
        return assigned

    def restore(self, message: Message) -> Message:
        """Return a message of a client with the ids that the model wrote."""
        if message["role"] == "tool" and (written := self.sampled.get(message.get("tool_call_id", ""))):
            return {**message, "tool_call_id": written}
        calls = message.get("tool_calls") or ()
        if any(call.get("id") in self.sampled for call in calls):
            return {
                **message,
                "tool_calls": [{**call, "id": self.sampled.get(call.get("id"), call.get("id"))} for call in calls],
            }
        return message


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

    def read(
        self, result: GenerateResult, call: ModelCall, assign_ids: Callable[[Sequence[ToolCall]], Sequence[str]]
    ) -> ReadTurn:
        """Return the text and the calls of a turn; `assign_ids` gives the ids of its calls."""
        text, calls = self._parse(result.token_ids, call)
        reasoning, content = ("", text) if self.split is None else self.split(text)
        stop = result.stop_reason if isinstance(result.stop_reason, str) else None
        if stop is not None and stop in content:
            content = content[: content.rindex(stop)]  # the last token may reach beyond the stop string
        finish: Finish = "length" if result.finish_reason.is_cut else "stop"
        return ReadTurn(
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(map(_openai_call, calls, assign_ids(calls))),
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
            text, calls = parse_turn(self.parser, token_ids, call.tools)
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
    return CallOfTool(id=call_id, name=call.name or UNNAMED_CALL, arguments=format_arguments(call))
