"""Streams that join a call whose client has left: they have what was sampled, while it is sampled."""

import asyncio

import pytest
from attrs import evolve
from gated_engine import MARKED, GatedEngine, leave, settle_loop
from session_scenarios import Sessions, make_call, user

from turnwise_gateway.calls import PartialReply

QUESTION = user("Question 0?")


@pytest.mark.parametrize("num_retries", [1, 2])
def test_a_retry_reads_what_was_sampled_before_it_came(num_retries):
    """It has the decided part, and the parts that follow, before the turn ends; so has a retry of the retry."""
    parts, engines = [], []

    def make_engine(probe):
        engines.append(GatedEngine(probe.engine(), probe.chat))
        return engines[-1]

    async def scenario(session):
        (engine,) = engines

        def call(**options):
            reply = PartialReply()
            return reply, asyncio.ensure_future(
                session.answer(evolve(make_call(QUESTION, tools=(), **options), partial_reply=reply))
            )

        _, waiting = call()
        await engine.wait_for_request(1)
        listen = engine.asked[0].on_tokens
        listen(engine.encode("one "))
        for _ in range(num_retries):
            await leave(waiting)
            retry, waiting = call(**MARKED)
            await settle_loop()
        parts.append(retry.read())
        retry.changed.clear()
        listen(engine.encode("two "))
        assert retry.changed.is_set()
        parts.append(retry.read())
        engine.let_go()
        (await waiting).confirm()

    done = Sessions(parts={"split": None}).run(scenario, engine=make_engine, finish_left_calls=True)

    assert ["one ", "one two "] == [part and part.content for part in parts]
    assert num_retries == done.counts["joined"]
