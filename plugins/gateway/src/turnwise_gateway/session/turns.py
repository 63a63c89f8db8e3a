"""Reads a sampled turn: its text, reasoning and tool calls, as the client gets them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from attrs import frozen

from turnwise import Chat, GenerateResult, Message, ToolParser
from turnwise.messages import CallSoFar, TurnSoFar, format_arguments
from turnwise.task_tools import parse_turn
from turnwise.types import TokenArray
from turnwise_gateway.calls import CallOfTool, Finish, ModelCall
from turnwise_gateway.session.call_ids import NameCall
from turnwise_gateway.session.drafts import (
    GrowingText,
    Settle,
    TurnDraft,
    find_stream,
    find_streaming_parser,
)
from turnwise_gateway.session.texts import arrange, build_calls
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

    def read(self, result: GenerateResult, call: ModelCall, name_call: NameCall) -> ReadTurn:
        """Return the text and the calls of a turn; `name_call` gives the ids of its calls."""
        turn = self._parse(result.token_ids, call)
        stop = result.stop_reason if isinstance(result.stop_reason, str) else None
        texts = arrange(turn.texts, self.split, stop)
        calls = build_calls(turn.calls, texts.places, name_call, is_whole=True)
        finish: Finish = "length" if result.finish_reason.is_cut else "stop"
        return ReadTurn(
            content=texts.content,
            reasoning=texts.reasoning,
            tool_calls=calls,
            finish="tool_calls" if calls and finish == "stop" else finish,
            stop=stop,
            num_reasoning_tokens=self._count_reasoning(result.token_ids, texts.reasoning),
        )

    def draft(self, call: ModelCall, stops: Sequence[str]) -> TurnDraft | None:
        """Return a reader of a turn that is being sampled; None if a parser does not report the decided part."""
        stream = find_stream(self.parser if self._parses(call) else None, call.tools)
        if stream is None or (self.split is not None and self.settle is None):
            return None
        # Log-probabilities are of the whole turn, and dialects have a place for them in its content only.
        shows_calls = self.keeps_malformed and not call.logprobs
        return TurnDraft(GrowingText(self.chat), stream, self.split, self.settle, stops, shows_calls)

    def token_texts(self, token_ids: TokenArray) -> tuple[str, ...]:
        """Return the text of each id."""
        return tuple(self.chat.tokenizer.decode([int(token_id)]) for token_id in token_ids)

    def _parses(self, call: ModelCall) -> bool:
        return self.parser is not None and bool(call.tools) and call.tool_choice != "none"

    def _parse(self, token_ids: TokenArray, call: ModelCall) -> TurnSoFar:
        """Return the texts and the calls of a turn; one with a malformed call may be all text, as in other APIs."""
        if self.parser is not None and self._parses(call):
            turn = self._read_calls(self.parser, token_ids, call)
            if self.keeps_malformed or all(each.is_complete for each in turn.calls):
                return turn
        return TurnSoFar(texts=(self.chat.text(token_ids),))

    def _read_calls(self, parser: ToolParser, token_ids: TokenArray, call: ModelCall) -> TurnSoFar:
        if (streaming := find_streaming_parser(parser)) is not None:
            return streaming.follow(call.tools).read(self.chat.text(token_ids), is_whole=True)
        text, calls = parse_turn(parser, token_ids, call.tools)
        found = (
            CallSoFar(name=each.name, arguments=format_arguments(each), is_complete=not each.error, id=each.id)
            for each in calls
        )
        return TurnSoFar(texts=(text, *[""] * len(calls)), calls=tuple(found))

    def _count_reasoning(self, token_ids: TokenArray, reasoning: str) -> int:
        if not reasoning:
            return 0
        decode = self.chat.tokenizer.decode
        end = decode(token_ids).find(reasoning) + len(reasoning)
        return bisect_left(range(len(token_ids)), end, key=lambda num_tokens: len(decode(token_ids[:num_tokens])))
