"""
Chooses the record of a call, and writes the call's new messages to it.

Nothing here waits: between the lookup and the start of the sampling no other call of the session runs, so a session
needs no lock. A record takes one call at a time; a second one branches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np
from attrs import define, evolve, field, frozen

from turnwise import Chat, Episode, GenerateResult, Message, Trajectory
from turnwise.errors import BudgetExhausted, PromptTooLongError, TemplateError
from turnwise.record.pictures import split_media
from turnwise.record.trajectory import Mark
from turnwise.types import ToolSchema, as_token_array
from turnwise_gateway.calls import CallRefusedError, ModelCall, ModelReply
from turnwise_gateway.session.call_ids import CallIds
from turnwise_gateway.session.contexts import Context, check_pictures, context_full, digest, equals_joined
from turnwise_gateway.session.options import SessionOptions
from turnwise_gateway.session.rendering import Rendering, render_prompt
from turnwise_gateway.tree.joined_turns import is_part, join_turns
from turnwise_gateway.tree.known_prefixes import KnownPrefixes
from turnwise_gateway.tree.messages import ReadCalls, Split, is_plain, normalise, split_think, tools_key
from turnwise_gateway.tree.places import ConversationNode, ConversationTree, Match, last_turn, messages_between

_NO_TOOLS: Final = tools_key(())


@define(eq=False)
class OpenRecord:
    """
    A record of the episode, and the conversation in it.

    Attributes:
        trajectory: the tokens.
        name: of its conversation, the same in every order of calls; empty for the task's own.
        tools: key of the tools in its prompt.
        last_node: the conversation that its tokens end with.
        prompt: messages of its prompt; those of its parent for a branch.
        headers: of the call that opened it.
        untrained_model: name of a model that is not trained, as the call sent it; empty for the policy in training.
        parent: the record that it branched from.
        reason: why it was opened.
        num_turns: turns of the model, those of its parents included.
        num_sampled: tokens that were sampled in it and delivered.
        last_delivery: number of its last turn among all that the session delivered.
        is_sampling: a call samples in it.
        turn: was sampled in it and is not delivered yet.
        last_text: of its last turn.
    """

    trajectory: Trajectory
    name: str
    tools: str
    last_node: ConversationNode[ResumePoint]
    prompt: tuple[Message, ...]
    headers: Mapping[str, str]
    untrained_model: str = ""
    parent: OpenRecord | None = None
    reason: str = ""
    num_turns: int = 0
    num_sampled: int = 0
    last_delivery: int = 0
    is_sampling: bool = False
    turn: SampledTurn | None = None
    last_text: str = ""

    @property
    def is_busy(self) -> bool:
        """Whether a call samples in it, or its answer is on the way to the client."""
        return self.is_sampling or (self.turn is not None and self.turn.num_answers > 0)

    def ends_at(self, point: ResumePoint) -> bool:
        """Return whether a call can continue the record itself at a point."""
        return not self.is_busy and len(self.trajectory) == point.num_tokens


@frozen(eq=False)
class ResumePoint:
    """A place in a record, the conversation up to it, and the number of turns before it."""

    record: OpenRecord
    place: ConversationNode[ResumePoint]
    mark: Mark
    num_tokens: int
    num_turns: int


@define(eq=False)
class SampledTurn:
    """
    A turn of the model that no client has yet.

    Attributes:
        record: that it continues.
        place: the conversation with it.
        result: of the engine.
        reply: as the client reads it.
        call: the request, without its body.
        number: of the call that it was sampled for.
        num_answers: answers with it that are on the way.
    """

    record: OpenRecord
    place: ConversationNode[ResumePoint]
    result: GenerateResult
    reply: ModelReply
    call: ModelCall
    number: int = 0
    num_answers: int = 0


@frozen
class Choice:
    """
    The record of a call, before anything is written.

    Attributes:
        point: to continue at, in the record itself or in a branch; None opens a record with a new prompt.
        messages: new ones after the point, or all of them for a new prompt.
        ids: tokens of `messages`.
        reason: why the call does not continue a record; empty when it does.
    """

    point: ResumePoint | None
    messages: tuple[Message, ...]
    ids: Context
    reason: str = ""


@frozen
class _Prepared:
    """
    Messages as the session renders them.

    Attributes:
        messages: of the conversation.
        in_head: all are system messages.
        tools: by the ids of the calls in them.
        unnamed: ids of calls whose tools are not known.
    """

    messages: tuple[Message, ...] = ()
    in_head: bool = True
    tools: Mapping[str, str] = field(factory=dict)
    unnamed: frozenset[str] = frozenset()


@define(eq=False)
class SessionRecords:
    """
    The records of a session.

    Attributes:
        episode: that holds them.
        chat: renders prompts and new messages.
        options: of the session.
        ids: of tool calls.
        split: splits the reasoning from a text.
        read_calls: reads the calls in the text of a turn; None in a run without a parser.
        records: in the order of their opening.
    """

    episode: Episode
    chat: Chat
    options: SessionOptions
    ids: CallIds
    split: Split = split_think
    read_calls: ReadCalls | None = None
    records: list[OpenRecord] = field(factory=list, init=False)
    _trees: dict[str, ConversationTree[ResumePoint]] = field(init=False)
    _task_forms: list[tuple[object, ...]] | None = field(init=False)
    _tool_names: dict[str, str] = field(factory=dict, init=False)
    _prepared: KnownPrefixes[_Prepared] = field(factory=KnownPrefixes, init=False)
    _last_tools: tuple[tuple[ToolSchema, ...], str] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._trees = defaultdict(partial(ConversationTree, self.split, _rank, self.read_calls))
        messages = self.episode.task.messages
        # The dialects read no other form, so no conversation of this session has such messages.
        is_read = all(is_plain(message) for message in messages)
        self._task_forms = [normalise(message, self.split).key for message in messages] if is_read else None

    def tree(self, model: str) -> ConversationTree[ResumePoint]:
        """Return the conversations with a model; a model that is not trained has its own, and continues no others."""
        return self._trees[self.options.untrained_name(model)]

    def prepare(self, call: ModelCall) -> ModelCall:
        """Return the call with the messages and tools that this session renders."""
        start, known = self._prepared.find(None, call.messages) or (0, _Prepared())
        if not known.unnamed.isdisjoint(self._tool_names):
            start, known = 0, _Prepared()  # a tool of these messages was not known before
        given, tree = call.messages, self.tree(call.model)
        if any(map(partial(is_part, tree), given[start:])):  # the other parts may be among the known messages
            start, known, given = 0, _Prepared(), join_turns(tree, given)
        messages, in_head, tools, unnamed = list(known.messages), known.in_head, dict(known.tools), set(known.unnamed)
        for index in range(start, len(given)):
            message = given[index]
            in_head = in_head and message["role"] == "system"
            tools.update(_name_tools(message))
            messages.append(message if in_head else self._prepare_message(index, message, tools))
            if message["role"] == "tool" and "name" not in messages[-1]:
                unnamed.add(message.get("tool_call_id", ""))
        prepared = tuple(messages)
        self._prepared.keep(None, call.messages, _Prepared(prepared, in_head, tools, frozenset(unnamed)))
        return evolve(call, messages=prepared, tools=() if call.tool_choice == "none" else call.tools)

    def locate(self, call: ModelCall) -> tuple[ModelCall, str, Match[ResumePoint]]:
        """Return a prepared call, the key of its tools, and the known part of its conversation."""
        prepared = self.prepare(call)
        tools = self.tools_key(prepared.tools)
        return prepared, tools, self.tree(call.model).locate(tools, prepared.messages)

    def tools_key(self, tools: tuple[ToolSchema, ...]) -> str:
        """Return the key of the tools of a call; a later call with the same tools has the same object."""
        if self._last_tools is None or self._last_tools[0] is not tools:
            self._last_tools = (tools, tools_key(tools))
        return self._last_tools[1]

    def choose(self, call: ModelCall, tools: str, location: Match[ResumePoint], rendering: Rendering) -> Choice:
        """
        Return the record of a call; nothing changes.

        Raises:
            CallRefusedError: the template refuses the conversation, or it does not fit the record.
            LongTextError: a text is not there as tokens.
        """
        choice = self._continue(location, rendering)
        if choice.point is None or self.options.history == "template":
            prompt = render_prompt(call, tools, rendering)
            if choice.point is not None:
                point = choice.point
                if equals_joined(prompt, point.record.trajectory, point.num_tokens, choice.ids):
                    return choice
                choice = Choice(None, (), choice.ids, "history")
            is_known = self.tree(call.model).knows(call.messages, except_tools=tools)
            reason = choice.reason or ("tools" if is_known else "")
            return Choice(None, call.messages, prompt, reason)
        return choice

    def count_tokens(self, choice: Choice) -> int:
        """Return the number of tokens of the context of a call."""
        return len(choice.ids) + (choice.point.num_tokens if choice.point else 0)

    def open(self, call: ModelCall, tools: str, choice: Choice) -> OpenRecord:
        """
        Return the record of a call with the call's messages written to it, reserved for the call.

        Raises:
            CallRefusedError: the conversation does not fit, or the episode takes no further record.
        """
        point = choice.point
        if point is None:
            record = self._begin(call, tools, choice)
        else:
            self._check_room(point, choice)
            record = point.record if point.record.ends_at(point) else self._branch(call, point, choice)
            if choice.messages:
                self.episode.observe(choice.ids, record=record.trajectory)
                record.last_node = self.tree(call.model).add(record.last_node, choice.messages)
                self.add_point(record)
        record.is_sampling = True
        return record

    def add_point(self, record: OpenRecord) -> None:
        """Note that the record's tokens end with the conversation of its last_node."""
        trajectory = record.trajectory
        record.last_node.points.append(
            ResumePoint(record, record.last_node, trajectory.mark(), len(trajectory), record.num_turns)
        )

    def forget_conversations(self) -> None:
        """Forget the conversations; the records stay."""
        for tree in self._trees.values():
            tree.forget()

    def name_call(self, call_id: str, tool: str) -> None:
        """Remember the tool of a call, for templates that show it with the result."""
        self._tool_names[call_id] = tool

    def _prepare_message(self, index: int, message: Message, tools: Mapping[str, str]) -> Message:
        """Return a message behind the system messages at the start."""
        if message["role"] == "system":
            if self.options.mid_system == "refuse":
                text = "a system message after the first messages is refused: see the option mid_system"
                raise CallRefusedError("invalid", text, param=f"messages[{index}]")
            return {**message, "role": "user"} if self.options.mid_system == "user" else message
        if message["role"] == "tool" and "name" not in message:
            call_id = message.get("tool_call_id", "")
            # The conversation comes first: the model may write one id in two conversations of a session.
            tool = tools.get(call_id, self._tool_names.get(call_id))
            message = message if tool is None else {**message, "name": tool}
        return self.ids.restore(message)

    def _continue(self, location: Match[ResumePoint], rendering: Rendering) -> Choice:
        """Return the point at which a known conversation continues; without one, the reason for that."""
        none, place = np.zeros(0, np.int32), location.place
        if not location.rest and place.points and not place.is_turn:
            point = _free_point(place)
            return Choice(point, (), none, "" if point.record.ends_at(point) else "sibling")
        turn = last_turn(place)
        if turn is None:
            follows = bool(place.points and location.rest and location.rest[0]["role"] == "assistant")
            return Choice(None, (), none, "foreign_turn" if follows else "")
        messages = (*messages_between(turn, place), *location.rest)
        if any(message["role"] == "assistant" for message in messages):
            return Choice(None, (), none, "foreign_turn")
        if not turn.points or not messages:
            return Choice(None, (), none, "no_new_message")
        point = _free_point(turn)
        try:
            last_token_id = int(point.record.trajectory.input_ids[point.num_tokens - 1])
            ids = rendering.delta(messages, last_token_id, with_tools=point.record.tools != _NO_TOOLS)
        except TemplateError:
            return Choice(None, (), none, "template")
        reason = "" if point.record.ends_at(point) else "busy" if point.record.is_busy else "inside"
        return Choice(point, messages, ids, reason)

    def _check_room(self, point: ResumePoint, choice: Choice) -> None:
        trajectory = point.record.trajectory
        limit = len(trajectory) + self.episode.remaining(trajectory)
        if self.count_tokens(choice) >= limit:
            raise context_full(self.count_tokens(choice), limit)
        check_pictures(trajectory, point.num_tokens, choice.ids, self.episode.max_pictures)

    def _begin(self, call: ModelCall, tools: str, choice: Choice) -> OpenRecord:
        check_pictures(None, 0, choice.ids, self.episode.max_pictures)
        name = self._name_conversation(call, choice.ids)
        try:
            trajectory = self.episode.begin(choice.ids, seed_name=name)
        except BudgetExhausted as error:
            raise CallRefusedError("budget_exhausted", str(error)) from error
        except PromptTooLongError as error:
            raise context_full(error.num_tokens, error.max_tokens) from error
        tree = self.tree(call.model)
        place = tree.add(tree.root(tools), call.messages)
        given = (call.messages, call.headers, self.options.untrained_name(call.model))
        record = OpenRecord(trajectory, name, tools, place, *given, reason=choice.reason)
        self.records.append(record)
        if trajectory.num_prompt_tokens != len(choice.ids):
            # The run's policy cuts long prompts, but an agent must learn that its conversation does not fit.
            record.is_sampling = True
            raise context_full(len(choice.ids), trajectory.num_prompt_tokens)
        self.add_point(record)
        return record

    def _branch(self, call: ModelCall, point: ResumePoint, choice: Choice) -> OpenRecord:
        parent = point.record
        try:
            trajectory = self.episode.branch(parent.trajectory, point.mark, seed_name=f"branch of {parent.name}")
        except BudgetExhausted as error:
            raise CallRefusedError("budget_exhausted", str(error)) from error
        record = OpenRecord(
            trajectory=trajectory,
            name=parent.name,
            tools=parent.tools,
            last_node=point.place,
            prompt=parent.prompt,
            headers=call.headers,
            untrained_model=parent.untrained_model,
            parent=parent,
            reason=choice.reason,
            num_turns=point.num_turns,
        )
        self.records.append(record)
        self.add_point(record)
        return record

    def _name_conversation(self, call: ModelCall, prompt: Context) -> str:
        forms = [normalise(message, self.split).key for message in call.messages]
        if forms == self._task_forms and all(record.name for record in self.records):
            return ""
        ids, pictures = split_media(prompt)
        return digest(as_token_array(ids), pictures, 8)


def _name_tools(message: Message) -> dict[str, str]:
    """Return the names of the tools that a message calls, by the ids of the calls."""
    return {call.get("id", ""): call["function"]["name"] for call in message.get("tool_calls") or ()}


def _free_point(place: ConversationNode[ResumePoint]) -> ResumePoint:
    """Return a point of a conversation whose record can continue, or else the first."""
    return next((point for point in place.points if point.record.ends_at(point)), place.points[0])


def _rank(place: ConversationNode[ResumePoint]) -> int:
    """Return the rank of a place among others with the same conversation: one that a record can continue is first."""
    turn = last_turn(place)
    points = place.points or (turn.points if turn else [])
    return 0 if any(point.record.ends_at(point) for point in points) else 1 if points else 2
