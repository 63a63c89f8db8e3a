"""
The conversations of a session as a tree: one place for each message, with the records that have it as tokens.

A request is looked up message by message, from the place of an earlier request that it continues or from the root. A
message that has the form in which it was last seen costs one comparison, so that only new messages are brought to their
normal form.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from attrs import define, field, frozen

from turnwise import Message
from turnwise_gateway.tree.known_prefixes import KnownPrefixes
from turnwise_gateway.tree.messages import (
    Defaults,
    NormalForm,
    ReadCalls,
    Split,
    call_ids,
    name_tolerances,
    normalise,
    normalise_written,
    read_defaults,
    repeats_reasoning,
    split_think,
)

T = TypeVar("T")

_NO_FORM: Final = NormalForm("", "")


@define(eq=False)
class ConversationNode(Generic[T]):
    """
    A conversation up to a message.

    Attributes:
        parent: the conversation without the message; None for a root.
        message: in its first form: as the client got it, or as it sent it.
        form: normal form of the message.
        stops: strings that end a turn of its request, any of which its echo may have at the end.
        is_turn: the model sampled the message, in this session.
        points: places in records at which their tokens end with this conversation, in the order of their making. After
            a message of the environment the model's turn can start there; after a turn, tokens of new messages.
        children: conversations with one more message.
        seen: form of the message in the last request that had it.
        counted: names of the tolerances that this message needed.
        written: form with the calls of its text, as soon as it was needed.
    """

    parent: ConversationNode[T] | None
    message: Message
    form: NormalForm
    is_turn: bool = False
    stops: tuple[str, ...] = ()
    points: list[T] = field(factory=list)
    children: list[ConversationNode[T]] = field(factory=list)
    seen: Message | None = None
    counted: frozenset[str] = frozenset()  # the empty one is shared
    written: NormalForm | None = None

    def agrees(self, form: NormalForm, own: NormalForm | None = None) -> bool:
        """
        Return whether a message with this form is this one, with the form `own` if any.

        Its reasoning may be missing, or be there twice.
        """
        reasoning, own = self.form.reasoning, self.form if own is None else own
        form = form.without_copies(own) if self.is_turn else form
        # A message of the client's may have lost its reasoning when it was first seen; a turn of the model has its own.
        kept = form.reasoning in ("", reasoning) or not (reasoning or self.is_turn)
        kept = kept or repeats_reasoning(form.reasoning, reasoning)
        return kept and (
            form.echoes(own)
            # The calls identify the turn, so the record keeps the text, as it keeps reasoning that a client drops.
            or (self.is_turn and form.echoes_calls(own))
            or any(form.text.endswith(stop) and form.without_end(stop).echoes(own) for stop in self.stops)
        )

    def conversation(self) -> list[Message]:
        """Return all messages up to this one, each in its first form."""
        messages: list[Message] = []
        place: ConversationNode[T] | None = self
        while place is not None and place.parent is not None:
            messages.append(place.message)
            place = place.parent
        return messages[::-1]

    def within(self, earlier: ConversationNode[T]) -> bool:
        """Return whether this conversation starts with another, or is it."""
        place: ConversationNode[T] | None = self
        while place is not None and place is not earlier:
            place = place.parent
        return place is earlier


@frozen(eq=False)
class Echo(Generic[T]):
    """
    A known message in another form than the last one.

    Attributes:
        place: of the message.
        message: as it is now.
        is_written: the two agree only by the calls in their texts.
    """

    place: ConversationNode[T]
    message: Message
    is_written: bool


@frozen(eq=False)
class Match(Generic[T]):
    """
    The part of a conversation that a tree knows.

    Attributes:
        place: deepest place whose conversation starts the request's.
        rest: messages after the place, without empty assistant messages.
        echoes: known messages whose form differs from the one last seen.
        num_empty: empty assistant messages that were skipped.
        trail: start for the lookup of a request that continues this one.
    """

    place: ConversationNode[T]
    rest: tuple[Message, ...]
    echoes: tuple[Echo[T], ...] = ()
    num_empty: int = 0
    trail: _Trail[T] | None = None


@frozen(eq=False)
class _Step(Generic[T]):
    """A place that the lookup has reached, and how it came there; `before` is the step before."""

    place: ConversationNode[T]
    num_messages: int
    before: _Step[T] | None = None
    echo: Message | None = None
    num_empty: int = 0
    is_written: bool = False


@frozen(eq=False)
class _Trail(Generic[T]):
    """A place that is the only one after some messages with some tools, while the tree has no more forks."""

    tools: str
    messages: tuple[Message, ...]
    place: ConversationNode[T]
    num_forks: int


@define(eq=False)
class ConversationTree(Generic[T]):
    """
    The conversations of one session. `T` is the type of its points.

    Attributes:
        split: splits the reasoning from a text.
        rank: of places with the same conversation, the lookup takes the one with the lowest rank.
        read_calls: reads the calls in the text of a turn; None in a run without a parser.
    """

    split: Split = split_think
    rank: Callable[[ConversationNode[T]], int] = field(default=lambda place: -len(place.points))
    read_calls: ReadCalls | None = None
    _roots: dict[str, ConversationNode[T]] = field(factory=dict, init=False)
    _owners: dict[str, ConversationNode[T]] = field(factory=dict, init=False)
    _defaults: Defaults = field(factory=dict, init=False)
    _trails: KnownPrefixes[ConversationNode[T]] = field(factory=KnownPrefixes, init=False)
    _num_forks: int = field(default=0, init=False)

    def root(self, tools: str) -> ConversationNode[T]:
        """Return the empty conversation with these tools; see `turnwise_gateway.tree.messages.tools_key`."""
        if tools not in self._roots:
            self._roots[tools] = ConversationNode(None, {}, _NO_FORM)
            self._defaults = {**self._defaults, **read_defaults(json.loads(tools))}
            self._forget_trails()  # more messages may agree with known ones
        return self._roots[tools]

    def locate(self, tools: str, messages: Sequence[Message]) -> Match[T]:
        """Return the known part of a conversation: the deepest that ends with the model's turn, or else the deepest."""
        given = tuple(messages)
        # A root is made when something is added to it: a refused request leaves nothing.
        start, place = self._trails.find(tools, given) or (
            0,
            self._roots.get(tools) or ConversationNode(None, {}, _NO_FORM),
        )
        steps = [_Step(place, start)]
        only = steps[0]
        left: list[_Step[T]] = []
        for index in range(start, len(given)):
            following = self._follow(steps, index, given[index], tools)
            if not following:
                break
            # Places that are not on the way now may be so when they have children, so a fork or a skip ends the trail.
            if only is steps[0]:
                only = following[0] if len(following) == 1 and following[0].place is not only.place else only
            if len(steps) > 1:  # somebody's prompt may repeat turns of the model, and lead deeper than they do
                left += [step for step in steps if all(each.before is not step for each in following)]
            steps = following
        trail = _Trail(tools, given[: only.num_messages], only.place, self._num_forks)
        return self._locate(self._choose([*steps, *left], given), given, trail)

    def add(self, place: ConversationNode[T], messages: Iterable[Message]) -> ConversationNode[T]:
        """Return the place after further messages, which are not the model's; known ones are found."""
        for message in messages:
            form = self.normalise(message)
            known = [child for child in place.children if child.agrees(form) and not child.is_turn]
            if not known:
                known = [ConversationNode(place, message, form, seen=message)]
                self._attach(place, known[0])
            place = known[0]
        return place

    def add_turn(self, place: ConversationNode[T], message: Message, stops: Iterable[str] = ()) -> ConversationNode[T]:
        """
        Add a turn of the model, and make it the owner of its calls.

        Args:
            place: the conversation before the turn.
            message: as the client gets it, with the ids of its calls.
            stops: texts that may end the turn and are no part of the message. Its echo may have one of them, also if
                another one, or none, has ended the turn: smolagents closes the code of each turn.
        """
        form = self.normalise(message)
        ends = tuple(filter(None, (stop.strip() for stop in stops)))
        turn: ConversationNode[T] = ConversationNode(place, message, form, is_turn=True, stops=ends)
        self._attach(place, turn)
        for call in message.get("tool_calls") or ():
            self._owners[call["id"]] = turn
        return turn

    def remove_turn(self, turn: ConversationNode[T]) -> None:
        """Forget a turn that no client has."""
        if turn.parent is not None and turn in turn.parent.children:
            turn.parent.children.remove(turn)
            self._forget_trails()
        for call in turn.message.get("tool_calls") or ():
            self._owners.pop(call["id"], None)

    def normalise(self, message: Message) -> NormalForm:
        """Return the form in which a message of a request is compared."""
        return normalise(message, self.split, self._defaults)

    def owner(self, call_id: str) -> ConversationNode[T] | None:
        """Return the turn that has a call with this id."""
        return self._owners.get(call_id)

    def knows(self, messages: Sequence[Message], *, except_tools: str) -> bool:
        """Return whether a conversation with other tools has a turn of the model that these messages echo."""
        others = [tools for tools in self._roots if tools != except_tools]
        return any(last_turn(self.locate(tools, messages).place) is not None for tools in others)

    def note(self, location: Match[T]) -> Counter[str]:
        """Remember the forms of a request's messages; return the tolerances that they need for the first time."""
        needed: Counter[str] = Counter()
        for echo in location.echoes:
            place, message = echo.place, echo.message
            names = name_tolerances(place.message, message, self.split, is_written=echo.is_written)
            needed.update(names - place.counted)
            place.counted |= names
            place.seen = message
        if location.num_empty:
            needed["empty_message"] += location.num_empty
        trail = location.trail
        if trail is not None and trail.num_forks == self._num_forks and trail.messages:
            self._trails.keep(trail.tools, trail.messages, trail.place)
        return needed

    def forget(self) -> None:
        """Forget all conversations: each place refers to its parent, which refers to it."""
        places = list(self._roots.values())
        while places:
            place = places.pop()
            places += place.children
            place.children, place.points = [], []
        self._roots.clear()
        self._owners.clear()
        self._forget_trails()

    def _forget_trails(self) -> None:
        self._trails.clear()
        self._num_forks += 1

    def _attach(self, place: ConversationNode[T], child: ConversationNode[T]) -> None:
        """Add a child to a place."""
        if place.children:
            self._forget_trails()  # the lookup of a known conversation may now find two places
        place.children.append(child)

    def _follow(self, steps: list[_Step[T]], index: int, message: Message, tools: str) -> list[_Step[T]]:
        """Return the places after one more message."""
        children = steps[0].place.children if len(steps) == 1 else []
        # One child alone: among turns with the same text, each must be found. An empty message may also be skipped.
        if len(children) == 1 and children[0].seen == message and not children[0].form.is_empty_turn:
            return [_Step(children[0], index + 1, steps[0], None, steps[0].num_empty)]
        form = self.normalise(message)
        following = [
            _Step(child, index + 1, step, message, step.num_empty)
            for step in steps
            for child in step.place.children
            if child.agrees(form)
        ]
        if form.is_empty_turn:  # a client added it, or it is a turn without text
            following += [_Step(step.place, index + 1, step, None, step.num_empty + 1) for step in steps]
        return following or self._follow_written(steps, index, message, form, tools)

    def _follow_written(
        self, steps: list[_Step[T]], index: int, message: Message, form: NormalForm, tools: str
    ) -> list[_Step[T]]:
        """Return the places after a turn whose calls the client has written anew, in the format of the run's parser."""
        read_calls = self.read_calls
        turns = [(step, child) for step in steps for child in step.place.children if child.is_turn]
        turns = [each for each in turns if form.may_rewrite(each[1].form)]
        if read_calls is None or form.role != "assistant" or not turns:
            return []
        schemas = json.loads(tools)
        echo = normalise_written(form, read_calls, schemas, self._defaults)
        if not echo.calls:
            return []
        for _, turn in turns:
            if turn.written is None:
                turn.written = normalise_written(turn.form, read_calls, schemas, self._defaults)
        return [
            _Step(turn, index + 1, step, message, step.num_empty, is_written=True)
            for step, turn in turns
            if turn.agrees(echo, turn.written)
        ]

    def _choose(self, steps: list[_Step[T]], messages: Sequence[Message]) -> _Step[T]:
        """Return one of the steps that fit: behind a turn of the model, with the request's last call id, and deep."""
        if len(steps) == 1:
            return steps[0]
        owner = next((self._owners[each] for each in call_ids(messages) if each in self._owners), None)

        def order(step: _Step[T]) -> tuple[bool, bool, int, bool, int, int]:
            is_owned = owner is not None and step.place.within(owner)
            # A request answers something, so an empty message at its end is no turn. Elsewhere the fewest are skipped.
            ends_in_turn = step.place.is_turn and step.num_messages == len(messages)
            is_foreign = self._is_foreign(step.place, messages[step.num_messages :])
            deepest = -step.num_messages
            # The id before the depth: another conversation may have the same texts, and be further by now.
            return (is_foreign, not is_owned, deepest, ends_in_turn, step.num_empty, self.rank(step.place))

        return min(steps, key=order)

    def _is_foreign(self, place: ConversationNode[T] | None, rest: Sequence[Message]) -> bool:
        """Return whether the last assistant message of a request is somebody else's; empty ones do not count."""
        while place is not None and not place.is_turn:
            if place.message.get("role") == "assistant" and not place.form.is_empty_turn:
                return True
            place = place.parent
        kept, _num_empty = without_empty(rest, self.split)
        return any(message["role"] == "assistant" for message in kept)

    def _locate(self, step: _Step[T], messages: Sequence[Message], trail: _Trail[T]) -> Match[T]:
        echoes = []
        walked: _Step[T] | None = step
        while walked is not None:
            if walked.echo is not None and walked.echo != walked.place.seen:
                echoes.append(Echo(walked.place, walked.echo, walked.is_written))
            walked = walked.before
        rest, num_empty = without_empty(messages[step.num_messages :], self.split)
        return Match(step.place, rest, tuple(echoes), step.num_empty + num_empty, trail)


def without_empty(messages: Iterable[Message], split: Split = split_think) -> tuple[tuple[Message, ...], int]:
    """Return messages without empty assistant messages, and the number of those."""
    given = tuple(messages)
    kept = tuple(each for each in given if each["role"] != "assistant" or not normalise(each, split).is_empty_turn)
    return kept, len(given) - len(kept)


def last_turn(place: ConversationNode[T] | None) -> ConversationNode[T] | None:
    """Return the last turn of the model in a conversation."""
    while place is not None and not place.is_turn:
        place = place.parent
    return place


def messages_between(turn: ConversationNode[T], place: ConversationNode[T]) -> list[Message]:
    """Return the messages after a turn up to a later place."""
    messages: list[Message] = []
    while place is not turn and place.parent is not None:
        messages.append(place.message)
        place = place.parent
    return messages[::-1]
