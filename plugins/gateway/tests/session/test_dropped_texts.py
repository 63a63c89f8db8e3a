"""Clients that send back the calls of a turn without the text beside them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from session_scenarios import Sessions, make_call, results_of, user

from turnwise_testing.engines.scripted import ScriptedEngine

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
QUESTION = user("Question 0?")


def saying(*turns):
    """Return a maker of an engine that samples these turns one after the other."""

    def make_engine(probe):
        encode, stop, left = probe.chat.tokenizer.encode, probe.chat.stop_token_ids[0], iter(turns)
        return ScriptedEngine(lambda _request: [*encode(next(left)), stop])

    return make_engine


async def ask(session, *messages):
    answer = await session.answer(make_call(*messages))
    answer.confirm()
    return answer.reply


def calls_alone(reply, content):
    """Return a turn as such a client keeps it."""
    function = {"type": "function"}
    listed = [
        {"id": call.id, **function, "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.tool_calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed}


@settings(deadline=None)
@given(
    turns=st.lists(st.sampled_from([CALL, f"Let me add.{CALL}", f"<think>Hm.</think>Let me add.{CALL}"]), min_size=1),
    content=st.sampled_from([None, "", "  "]),
)
def test_the_record_goes_on(turns, content):
    """Whatever a client drops beside its calls, the conversation is one record, which keeps what was sampled."""

    async def work(session):
        messages = [QUESTION]
        for _ in turns:
            reply = await ask(session, *messages)
            messages += [calls_alone(reply, content), *results_of(reply)]
        await ask(session, *messages)

    done = Sessions().run(work, engine=saying(*turns, "Done."))

    (record,) = done.records
    assert len(turns) + 1 == len(record.turns())
    assert int(np.sum(record.response_mask)) == sum(len(each.token_ids) for each in done.run.answers)


def test_equal_calls_are_told_apart_by_their_ids():
    """Two turns of one request have equal calls and other texts: the echo continues the turn that it came from."""

    async def work(session):
        first, second = [await ask(session, QUESTION) for _ in range(2)]
        assert first.content != second.content
        for reply in (second, first):
            await ask(session, QUESTION, calls_alone(reply, None), *results_of(reply))

    done = Sessions().run(work, engine=saying(f"One.{CALL}", f"Two.{CALL}", "Done.", "Done."))

    assert [2, 2] == [len(record.turns()) for record in done.records]
