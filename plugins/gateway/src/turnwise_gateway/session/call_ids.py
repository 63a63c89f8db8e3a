"""Ids of tool calls, which a client may read before the calls have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from turnwise import Chat, Message, ToolCall
from turnwise.messages import CallSoFar
from turnwise.naming import candidate_ids, ids_of_calls, sampled_id

NameCall = Callable[[int, CallSoFar], str]
"""Returns the id of the call with a number, from 0, in a turn; the same each time."""


@define(eq=False)
class CallIds:
    """
    Ids of tool calls, the same in every run: as the model sampled them, or new and unique in a session.

    A client finds the result of a call by its id. So an id that the model writes twice in a conversation is replaced
    for the client, and `sampled` brings it back for the prompt.

    Attributes:
        chat: the chat template.
        sampled: the id that the model wrote, by the id that the client has instead.
        used: all ids that were assigned.
    """

    chat: Chat
    sampled: dict[str, str] = field(factory=dict, init=False)
    used: set[str] = field(factory=set, init=False)

    def begin_turn(self, messages: Sequence[Message], *, record_name: str, turn: int) -> TurnCallIds:
        """
        Return the ids of the calls of a turn.

        Args:
            messages: of the conversation, as the client sent them.
            record_name: of the record, independent of the order of calls; empty for the record of the task itself.
            turn: number of the turn in its record, from 1.
        """
        return TurnCallIds(self, tuple(ids_of_calls(messages)), record_name, turn)

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


@frozen(eq=False)
class TurnCallIds:
    """
    The ids of the calls of one turn.

    Attributes:
        ids: of the session.
        before: ids in the conversation before the turn.
        record_name: as in `CallIds.begin_turn`.
        turn: as in `CallIds.begin_turn`.
        assigned: in the order of the calls.
    """

    ids: CallIds
    before: Sequence[str]
    record_name: str
    turn: int
    assigned: list[str] = field(factory=list, init=False)

    def name_call(self, index: int, call: CallSoFar) -> str:
        """Return the id of a call; each call is named after those before it."""
        if index == len(self.assigned):
            self.assigned.append(self._assign(index, call))
            self.ids.used.add(self.assigned[index])
        call_id = self.assigned[index]
        if (late := self._written(call, call.late_id)) is not None:
            self.ids.sampled[call_id] = late
        return call_id

    def release(self) -> None:
        """Forget the ids of a turn that is dropped before its end."""
        for call_id in self.assigned:
            self.ids.used.discard(call_id)
            self.ids.sampled.pop(call_id, None)
        self.assigned.clear()

    def _assign(self, index: int, call: CallSoFar) -> str:
        known = {*self.before, *self.assigned}
        written = self._written(call, call.id)
        if written is not None and written not in known:
            return written
        candidates = candidate_ids(
            call.name,
            self.ids.chat,
            turn=self.turn,
            index=index,
            number=len(self.before) + index,
            place=self.record_name,
        )
        call_id = next(name for name in candidates if name not in known | self.ids.used)
        if written is not None:
            self.ids.sampled[call_id] = written
        return call_id

    def _written(self, call: CallSoFar, call_id: str | None) -> str | None:
        return None if call_id is None else sampled_id(ToolCall(name=call.name, id=call_id), self.ids.chat)
