"""Numbered calls of an actor: they start in the order of their caller, in whatever order they arrive."""

import asyncio
import inspect
from itertools import permutations

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from turnwise.runtime.remote.actor_calls import CallOrder, OrderedActor, OrderedCalls, in_order


class Diary(OrderedActor):
    """An actor that notes what its calls do before their first wait, and behind it."""

    def __init__(self):
        self.notes = []

    @in_order
    async def write(self, text, waits=False):
        self.notes.append(text)
        if waits:
            await asyncio.sleep(0)
            self.notes.append(text.upper())
        return len(text)


@define(eq=False)
class Wire:
    """A handle whose calls do not arrive by themselves; `broken` ones cannot be sent."""

    sent: list = field(factory=list)
    broken: bool = False

    def options(self, *, num_returns):
        assert num_returns == 0
        return self

    def remote(self, *arguments):
        if self.broken:
            raise MemoryError("the object store is full")
        self.sent.append(arguments)


async def arrive(actor, calls, passes):
    """Let calls arrive in this order, each some passes of the event loop after the one before; return their replies."""
    async with asyncio.TaskGroup() as group:
        replies = []
        for (number, *arguments), count in zip(calls, passes, strict=True):
            replies.append(group.create_task(actor.write(number, *arguments)))
            for _ in range(count):
                await asyncio.sleep(0)
    return [reply.result() for reply in replies]


@given(st.data())
def test_calls_start_in_the_order_of_their_caller(data):
    """Each runs up to its first wait before the next one starts, and nothing is kept of calls that have started."""
    given_calls = data.draw(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12))
    passes = data.draw(st.lists(st.integers(0, 3), min_size=len(given_calls), max_size=len(given_calls)))
    method, calls, actor = Wire(), OrderedCalls(), Diary()
    for call in given_calls:
        data.draw(st.sampled_from([calls.post, calls.ask]))(method, *call)
    arrived = data.draw(st.permutations(method.sent))

    assert [1] * len(given_calls) == asyncio.run(arrive(actor, arrived, passes))

    assert [text for text, _waits in given_calls] == [note for note in actor.notes if note.islower()]
    assert 0 == actor.call_order.num_waiting


def test_a_call_that_cannot_be_sent_has_no_number():
    """Later calls would wait for it for ever."""
    method, calls = Wire(), OrderedCalls()
    for method.broken in (False, True, False):
        for send in (calls.post, calls.ask):
            try:
                send(method, "a")
            except MemoryError:
                assert method.broken

    assert [(number, "a") for number in range(4)] == method.sent


def test_each_actor_has_its_own_order():
    """A restarted actor begins anew, and calls for the one before do not count for it."""
    first, second = Diary(), Diary()
    asyncio.run(arrive(first, [(0, "a"), (1, "b")], (0, 0)))
    asyncio.run(arrive(second, [(0, "c")], (0,)))

    assert (["a", "b"], ["c"]) == (first.notes, second.notes)


@pytest.mark.parametrize("arrived", [*sorted(set(permutations([0, 0, 1]))), (2, 2)], ids=str)
def test_a_number_that_comes_twice_is_an_error(arrived):
    """Two callers with one count would otherwise start calls in any order."""

    async def call_all():
        order = CallOrder()
        async with asyncio.TaskGroup() as group:
            for number in arrived:
                group.create_task(order.wait(number))

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(call_all())
    assert [ValueError] == [type(each) for each in raised.value.exceptions]


def test_ray_sees_the_number_of_a_call():
    """Ray reads the parameters of a method before it sends a call, and whether it is a coroutine function."""
    assert ["self", "number", "arguments", "options"] == list(inspect.signature(Diary.write).parameters)
    assert inspect.iscoroutinefunction(Diary.write)
    assert "write" == Diary.write.__name__
