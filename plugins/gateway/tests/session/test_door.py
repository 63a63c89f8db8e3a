"""The door of a session: who is told what, in which order, and what a failure of a listener does."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from session_scenarios import Sessions, as_message, make_call, results_of, user

from turnwise import Status, ToolCall
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.session.door import SessionListener

ENDS = {
    "confirm": ["answer", "delivered"],
    "release": ["answer", "released"],
    "lose": ["answer", "delivered", "lost"],
    "refuse": ["refused"],
    "leave": ["left"],
}
EVENTS = ("call", "answer", "refused", "left", "outcome", "read", "close")


@define(eq=False)
class Recorder(SessionListener):
    """
    Notes what it is told, in a list that listeners share, and fails at one event.

    Attributes:
        name: of the listener.
        told: by name of the listener, and event of a number of a call.
        fails_at: name of an event.
    """

    name: str
    told: list
    fails_at: str | None = None

    def _note(self, event, number, word=None):
        self.told.append((self.name, word or event, number))
        if event == self.fails_at:
            raise OSError("the disk is full")

    def on_call(self, number, call):
        self._note("call", number)

    def on_answer(self, number, turn):
        self._note("answer", number)

    def on_refused(self, number, refusal):
        self._note("refused", number)

    def on_left(self, number):
        self._note("left", number)

    def on_outcome(self, number, outcome):
        self._note("outcome", number, outcome)

    def on_read(self, turn_id):
        self._note("read", None)

    def on_close(self, *, is_trained):
        self._note("close", None)


@define(eq=False)
class Client:
    """Makes calls that end in different ways."""

    session: object
    num_calls: int = field(default=0, init=False)

    async def act(self, end):
        self.num_calls += 1
        call = make_call(user(f"Question {self.num_calls}?"))
        if end == "refuse":
            with pytest.raises(CallRefusedError):
                await self.session.answer(make_call(user("Hi."), {"role": "system", "content": "Be brief."}))
            return
        if end == "leave":
            leaving = asyncio.ensure_future(self.session.answer(call))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            return
        answer = await self.session.answer(call)
        if end != "release":
            answer.confirm()
        {"confirm": lambda: None, "release": answer.release, "lose": answer.lose}[end]()


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(ENDS)), max_size=8))
def test_listeners_are_told_the_same_in_their_order(ends):
    """Each event is told to all listeners, in the order of their adding, before the next; each call has one end."""
    told = []

    async def scenario(session):
        session.door.listeners += [Recorder(name, told) for name in "ab"]
        client = Client(session)
        for end in ends:
            await client.act(end)

    Sessions(turns=("Yes.",)).run(scenario, mid_system="refuse")

    first, second = told[::2], told[1::2]
    assert [("a", *event) for _, *event in second] == first
    assert [("b", *event) for _, *event in first] == second
    expected = [(event, number) for number, end in enumerate(ends) for event in ("call", *ENDS[end])]
    assert [*expected, ("close", None)] == [(event, number) for _, event, number in first]


@pytest.mark.parametrize("fails_at", EVENTS)
def test_a_listener_that_fails_ends_the_session(fails_at):
    """The episode fails, so no call is lost in silence; the other listener is told all the same."""
    told, results = [], []

    async def scenario(session):
        session.door.listeners += [Recorder("a", told, fails_at), Recorder("b", told)]
        client = Client(session)
        for end in ("confirm", "leave", "refuse"):
            try:
                await client.act(end)
            except CallRefusedError as refusal:
                results.append(refusal.kind)
        session.deliver("no turn")

    done = Sessions(turns=("Yes.",)).run(scenario, mid_system="refuse")

    assert told[::2] == [("a", *event) for _, *event in told[1::2]]
    assert Status.FAILED is done.result.status
    assert "infra" == done.result.fault.owner
    assert "the disk is full" in done.result.fault.message
    assert fails_at != "call" or results[0] == "session_closed"


def test_nothing_is_told_or_counted_after_the_end():
    """A call after the end is refused without a trace, also if the end comes while the call is held up."""
    told = []

    async def scenario(session):
        session.door.listeners.append(Recorder("a", told))
        ending = asyncio.Event()

        @asynccontextmanager
        async def hold():
            session.door.end()
            ending.set()
            yield

        session.door.hold = hold
        calls = [
            lambda: session.answer(make_call(user("Question 0?"))),
            lambda: session.call_tool(ToolCall(name="add", arguments={})),
            lambda: session.answer(make_call(user("Question 0?"))),
            lambda: session.count_tokens(make_call(user("Question 0?"))),
        ]
        for call in calls:
            with pytest.raises(CallRefusedError, match="has ended"):
                await call()
        session.note_refusal(make_call(), CallRefusedError("context_length_exceeded", "it is too long"))
        assert ending.is_set()

    done = Sessions().run(scenario)

    assert [("a", "close", None)] == told
    assert 0 == done.session.num_calls
    assert {"calls": 0} == done.counts


def test_a_turn_has_the_number_of_its_call():
    """Also if the call's messages differ from those of the session, which counts the tolerances."""
    numbers = []

    class Numbers(SessionListener):
        def on_answer(self, number, turn):
            numbers.append((number, turn.number))

    async def work(session):
        session.door.listeners.append(Numbers())
        messages = [user("Question 0?")]
        for _ in range(3):
            answer = await session.answer(make_call(*messages))
            answer.confirm()
            echo = {**as_message(answer.reply), "content": f" {answer.reply.content} "}
            messages += [echo, *results_of(answer.reply), user("Go on.")]

    done = Sessions(("Some text.",)).run(work)

    assert [(0, 0), (1, 1), (2, 2)] == numbers
    assert done.counts["echo_whitespace"]
