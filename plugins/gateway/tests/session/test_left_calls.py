"""Calls whose clients leave before there is a turn: what they have sampled is counted, or finished for the retry."""

import asyncio
from itertools import product

import pytest
from gated_engine import MARKED, GatedEngine, leave, settle_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from session_scenarios import Sessions, make_call, user

from turnwise import FinishReason, Status
from turnwise.errors import EngineError
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory
from turnwise_gateway.session.door import SessionListener
from turnwise_gateway.session.left_calls import MAX_LEFT

QUESTION = user("Question 0?")


def run(scenario, **options):
    """Run a scenario of a session and its engine."""
    engines = []

    def make_engine(probe):
        engines.append(GatedEngine(probe.engine(), probe.chat))
        return engines[-1]

    return Sessions().run(lambda session: scenario(session, engines[0]), engine=make_engine, **options)


def count_sampled(done):
    """Return how many tokens the engine has sampled."""
    return sum(len(each.token_ids) for each in done.run.answers)


def count_trained(done):
    return sum(int(record.response_mask.sum()) for record in done.records)


RETRIES = {"none": None, "marked": MARKED, "unmarked": {}, "other": {**MARKED, "digest": "another"}}
STATES = ("before", "during", "after", "released")


async def leave_in_state(session, engine, state):
    """Call, and leave before, during or after the sampling, or with the answer on its way; return the reply if any."""
    call = make_call(QUESTION)
    if state == "released":
        engine.opens = True
        answer = await session.answer(call)
        answer.release()
        return answer.reply
    calling = asyncio.ensure_future(session.answer(call))
    if state != "before":
        await engine.wait_for_request(1)
    await leave(calling)
    if state == "after":
        engine.let_go()
        await settle_loop()
    return None


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize(("state", "retry"), list(product(STATES, RETRIES)))
def test_each_token_is_trained_or_counted(state, retry, finishes):
    """Whenever a client leaves and whatever it sends next: a read token is trained, and another one is counted."""
    found = {}

    async def scenario(session, engine):
        found["first"] = await leave_in_state(session, engine, state)
        if RETRIES[retry] is None:
            return
        again = asyncio.ensure_future(session.answer(make_call(QUESTION, **RETRIES[retry])))
        if not engine.opens:
            await settle_loop()
            engine.let_go()
        answer = await again
        answer.confirm()
        found["second"] = answer.reply

    done = run(scenario, finish_left_calls=finishes)

    assert count_trained(done) == (len(found["second"].token_ids) if "second" in found else 0)
    assert count_sampled(done) == count_trained(done) + done.counts.get("left_tokens", 0)
    kept = finishes and state in ("during", "after") and retry == "marked"
    again = state == "released" and retry in ("marked", "unmarked")
    num_asked = 1 if kept or again else 2 if state != "before" else 1
    if retry != "none":
        assert num_asked == len(done.run.answers)
        assert ("joined" in done.counts, "redelivered" in done.counts) == (kept, again)
        assert 1 == sum(len(record.turns()) for record in done.records)
    assert (done.counts.get("left_calls", 0) > 0) == (state != "before" and not kept and not again)


def test_a_turn_without_the_option_is_cut():
    """The engine is asked to stop at once, and the tokens that it had sampled are counted."""
    lengths = []

    async def scenario(session, engine):
        calling = asyncio.ensure_future(session.answer(make_call(QUESTION)))
        await engine.wait_for_request(1)
        await leave(calling)
        engine.opens = True
        answer = await session.answer(make_call(QUESTION))
        answer.confirm()
        lengths.append(len(answer.reply.token_ids))

    done = run(scenario)

    (cut, whole) = done.run.answers
    assert (FinishReason.ABORT, lengths[0]) == (cut.finish_reason, len(whole.token_ids))
    assert (1, len(cut.token_ids)) == (done.counts["left_calls"], done.counts["left_tokens"])
    assert len(cut.token_ids) > 0


def test_samples_beside_a_left_call_are_their_own():
    """An equal request without the mark samples beside the left call, and leaves the record of that call alone."""
    texts = []

    async def scenario(session, engine):
        calling = asyncio.ensure_future(session.answer(make_call(QUESTION)))
        await engine.wait_for_request(1)
        await leave(calling)
        engine.let_go()
        await settle_loop()
        for marked in ({}, MARKED, {}, MARKED):
            answer = await session.answer(make_call(QUESTION, **marked))
            answer.confirm()
            texts.append(answer.reply.content[0])

    done = run(scenario, finish_left_calls=True)

    assert list("1023") == texts
    assert 4 == sum(len(record.turns()) for record in done.records)
    assert 0 == done.counts.get("left_tokens", 0)


def test_a_retry_may_leave_too():
    """The second retry gets the turn that the first call has begun; it is sampled once."""

    async def scenario(session, engine):
        for changes in ({}, MARKED):
            calling = asyncio.ensure_future(session.answer(make_call(QUESTION, **changes)))
            await engine.wait_for_request(1)
            await settle_loop()
            await leave(calling)
        calling = asyncio.ensure_future(session.answer(make_call(QUESTION, **MARKED)))
        await settle_loop()
        engine.let_go()
        (await calling).confirm()

    done = run(scenario, finish_left_calls=True)

    assert (1, 1) == (len(done.run.answers), len(done.records[0].turns()))
    assert 2 == done.counts["joined"]


def test_left_calls_are_limited():
    """Further left calls end, as without the option; the end of the session ends those that go on."""

    async def scenario(session, engine):
        for number in range(MAX_LEFT + 2):
            calling = asyncio.ensure_future(session.answer(make_call(user(f"Question {number}?"))))
            await engine.wait_for_request(number + 1)
            await leave(calling)
        await settle_loop()
        assert [MAX_LEFT, MAX_LEFT + 1] == [number for number, each in enumerate(engine.may_end) if each.is_set()]

    done = run(scenario, finish_left_calls=True, max_calls=100)

    assert MAX_LEFT + 2 == done.counts["left_calls"]
    assert count_sampled(done) == done.counts["left_tokens"] > 0
    assert 0 == count_trained(done)


def test_a_failure_of_a_left_call_ends_the_session():
    """The engine's failure is that of the session, as if the client were there."""

    async def scenario(session, engine):
        calling = asyncio.ensure_future(session.answer(make_call(QUESTION)))
        await engine.wait_for_request(1)
        await leave(calling)

        async def fail(_request):
            raise EngineError("it broke")

        engine.engine = type("Broken", (), {"generate": staticmethod(fail), "capabilities": engine.capabilities})
        engine.let_go()
        await session.ending.wait()

    done = run(scenario, finish_left_calls=True)

    assert (Status.FAILED, "engine") == (done.result.status, done.result.fault.owner)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["call", "leave", "marked", "let go", "release"])),
        max_size=12,
    ),
    st.booleans(),
)
def test_every_token_has_one_place(steps, finishes):
    """Calls, retries and leavings in any order: trained and left tokens are those that the engine has sampled."""
    read = {}

    async def scenario(session, engine):
        open_calls = []
        for name, step in steps:
            if step in ("call", "marked"):
                changes = MARKED if step == "marked" else {}
                call = make_call(user(name), **changes)
                open_calls.append(asyncio.ensure_future(session.answer(call)))
            elif step == "let go":
                for event in engine.may_end:
                    event.set()
            elif open_calls:
                calling = open_calls.pop(len(name) % len(open_calls))
                if step == "leave" or not calling.done():
                    calling.cancel()
                    await asyncio.wait({calling})
                if not calling.cancelled():
                    calling.result().release()
            await settle_loop()
        engine.let_go()
        for calling in open_calls:
            answer = await calling
            answer.confirm()
            read[answer.reply.id] = len(answer.reply.token_ids)

    done = run(scenario, finish_left_calls=finishes)

    assert sum(read.values()) == count_trained(done)
    assert count_sampled(done) == count_trained(done) + done.counts.get("left_tokens", 0)


class Announcer(SessionListener):
    """Sets an event when the second try of a client has come."""

    def __init__(self):
        self.came = asyncio.Event()

    def on_call(self, number, call):
        if number == 1:
            self.came.set()


async def create(dialect, url, key, stream):
    """Call the model with a library that gives up early and tries again; return the text."""
    import anthropic
    import openai

    options = {"api_key": key, "timeout": 0.3, "max_retries": 8}
    if dialect == "messages":
        async with anthropic.AsyncAnthropic(base_url=url, **options) as client:
            request = {"model": "m", "max_tokens": 64, "messages": [QUESTION]}
            if stream:
                async with client.messages.stream(**request) as events:
                    return (await events.get_final_message()).content[0].text
            return (await client.messages.create(**request)).content[0].text
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
        if dialect == "responses":
            request = {"model": "m", "input": [QUESTION]}
            if stream:
                async with client.responses.stream(**request) as events:
                    return (await events.get_final_response()).output_text
            return (await client.responses.create(**request)).output_text
        request = {"model": "m", "messages": [QUESTION]}
        if stream:
            async with client.chat.completions.stream(**request) as events:
                return (await events.get_final_completion()).choices[0].message.content
        return (await client.chat.completions.create(**request)).choices[0].message.content


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_libraries_get_the_turn_that_they_left(dialect, stream):
    """A turn that takes longer than a client's timeout is sampled once, and its retry has it."""
    found = []

    async def scenario(session, engine):
        session.door.listeners.append(announcer := Announcer())
        directory = SessionDirectory("tiny")
        key = directory.add(session.name, session)
        async with GatewayServer(directory, ServerOptions()) as server, asyncio.TaskGroup() as group:
            calling = group.create_task(create(dialect, server.url(session.name), key, stream))
            await engine.wait_for_request(1)
            await announcer.came.wait()
            assert server.num_in_flight >= 1
            engine.let_go()
            found.append(await calling)
        assert 0 == server.num_in_flight

    done = run(scenario, finish_left_calls=True)

    assert "0:" == found[0].strip()
    assert (1, 1) == (len(done.run.answers), len(done.records[0].turns()))
    assert count_sampled(done) == count_trained(done)


def test_a_left_call_counts_as_one_in_flight():
    """While it is sampled, the server counts it; a turn that waits for its retry takes no place."""
    import openai

    async def scenario(session, engine):
        directory = SessionDirectory("tiny")
        key = directory.add(session.name, session)
        left = asyncio.Event()
        session.door.listeners.append(type("Heard", (SessionListener,), {"on_left": lambda _, __: left.set()})())
        async with GatewayServer(directory, ServerOptions(max_in_flight=1)) as server:
            options = {"base_url": f"{server.url(session.name)}/v1", "api_key": key, "max_retries": 0}
            async with openai.AsyncOpenAI(**options) as client:
                request = {"model": "m", "messages": [QUESTION]}
                calling = asyncio.ensure_future(client.chat.completions.create(**request))
                await engine.wait_for_request(1)
                await leave(calling)
                await left.wait()
                with pytest.raises(openai.RateLimitError):
                    await client.chat.completions.create(**request)
                engine.let_go()
                await settle_loop()
                assert 0 == server.num_in_flight
                await client.chat.completions.create(**request, extra_headers=MARKED["headers"])

    done = run(scenario, finish_left_calls=True)

    assert (1, 1) == (len(done.run.answers), done.counts["joined"])
