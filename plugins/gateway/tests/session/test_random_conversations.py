"""Properties of sessions over random agents: retries, edits, compaction, branches, cuts, calls at once."""

import asyncio
import gc
import random
from collections import Counter
from contextlib import contextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_agents import ACTIONS, RandomAgent, check_trained_once
from session_scenarios import Sessions, make_call, user

from turnwise import Status
from turnwise_gateway.calls import CallRefusedError

SEEDS = st.integers(0, 2**32)
PLANS = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=14)


def check_random_agent(seed, actions, **options):
    agent = RandomAgent(random.Random(seed), actions)
    done = Sessions().run(agent.run, **options)

    assert done.result.status in (Status.COMPLETED, Status.TRUNCATED)
    check_trained_once(done, agent)


# The prompt of an edited conversation repeats turns, and the empty message behind one of them.
HIDDEN_TURN = ["continue", "empty", "title", "continue", "continue", "edit", "continue", "edit", "keyed", "continue"]
# The conversation has an empty message at the place where a blank reply is lost later.
LOST_BLANK = ["edit", "cut", "empty", "keyed", "empty", "undelivered", "edit"]


@settings(max_examples=60)
@given(seed=SEEDS, actions=PLANS)
@example(seed=4008, actions=LOST_BLANK)
@example(seed=1175147, actions=HIDDEN_TURN)
@example(seed=0, actions=["lost", "undelivered"])  # the client leaves the second response, too
def test_every_delivered_token_is_trained_once(seed, actions):
    """Whatever an agent does, records keep the core's promises, and each turn that it read is trained once."""
    check_random_agent(seed, actions)


@settings(max_examples=60)
@given(seed=SEEDS, actions=PLANS)
def test_every_delivered_token_is_trained_once_with_finished_calls(seed, actions):
    """The same when left calls are sampled to their end: what no retry fetches is in no record, and is counted."""
    check_random_agent(seed, actions, finish_left_calls=True)


@pytest.mark.slow
@settings(max_examples=400)
@given(seed=SEEDS, actions=PLANS, finishes=st.booleans())
def test_every_delivered_token_is_trained_once_in_many_sessions(seed, actions, finishes):
    """The same for many more agents; `make test-long` takes more than twice as many."""
    check_random_agent(seed, actions, finish_left_calls=finishes)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), num_turns=st.integers(2, 8))
def test_no_false_forks(seed, num_turns):
    """A conversation that only grows stays in one record, however its echo is written."""
    agent = RandomAgent(random.Random(seed), ["continue"] * num_turns)
    done = Sessions().run(agent.run)

    assert 1 == len(done.records)
    assert num_turns - 1 == agent.num_extended
    assert num_turns == len(done.records[0].turns())


# The client sends an empty message where an empty reply was not delivered.
EMPTY_REPLY = ["edit", "empty", "parallel", "continue", "edit", "empty", "empty", "undelivered", "empty"]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), actions=st.lists(st.sampled_from(ACTIONS), max_size=10))
@example(seed=637, actions=EMPTY_REPLY)
def test_template_history_trains_once_too(seed, actions):
    """With `history: template` contexts are the template's renderings, and each turn is trained once."""
    agent = RandomAgent(random.Random(seed), actions, keeps_context=False)
    done = Sessions().run(agent.run, history="template")

    assert done.result.status in (Status.COMPLETED, Status.TRUNCATED)
    check_trained_once(done, agent)


@settings(max_examples=30)
@given(seed=SEEDS, actions=PLANS, finishes=st.booleans())
@example(seed=0, actions=list(ACTIONS), finishes=False)
def test_closed_sessions_need_no_garbage_collection(seed, actions, finishes):
    """Reference counts free a closed session: else all calls would wait while a collection finds the old ones."""
    with expecting_no_garbage():
        check_random_agent(seed, actions, finish_left_calls=finishes)


async def call_after_a_refusal(session):
    (await session.answer(make_call(user("Add.")))).confirm()
    with pytest.raises(CallRefusedError):
        await session.answer(make_call(user("Once more.")))


async def leave_calls(session):
    """Leave one call while it is sampled, and one with its turn."""
    call = asyncio.ensure_future(session.answer(make_call(user("Add."))))
    await session.changed.wait()
    call.cancel()
    (await session.answer(make_call(user("Once more.")))).release()


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        pytest.param(call_after_a_refusal, {"max_calls": 1}, id="the last call is refused"),
        pytest.param(leave_calls, {}, id="calls are left"),
        pytest.param(leave_calls, {"finish_left_calls": True}, id="left calls are sampled to their end"),
    ],
)
def test_odd_ends_need_no_garbage_collection(scenario, options):
    """The same after refused calls, and after calls that their clients left."""
    with expecting_no_garbage():
        Sessions().run(scenario, **options)


@contextmanager
def expecting_no_garbage():
    """Fail if the block leaves objects of the gateway that only a garbage collection frees."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = Counter(
            type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("turnwise_gateway.")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert Counter() == kinds
