"""Tests of sessions: records, delivery, retries, limits."""

import asyncio
import json

import numpy as np
import pytest
from attrs import evolve
from session_scenarios import ADD, Sessions, as_message, make_call, results_of, user

from turnwise import Status
from turnwise.record.columns import Origin
from turnwise.types import Capabilities
from turnwise_gateway.calls import CallRefusedError, Constraint
from turnwise_testing.engines.scripted import Failure, ScriptedEngine

CALLING = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'


async def ask(session, *messages, **changes):
    """Return the delivered reply to a conversation."""
    answer = await session.answer(make_call(*messages, **changes))
    answer.confirm()
    return answer.reply


def run(scenario, *turns, **options):
    return Sessions(turns or Sessions().turns).run(scenario, **options)


class StoppingEngine(ScriptedEngine):
    """Names the stop string of a request as the reason of each turn's end."""

    async def generate(self, request):
        return evolve(
            await super().generate(request), stop_reason=request.sampling.stop[0] if request.sampling.stop else None
        )


def numbered(probe):
    """Return an engine whose turns are numbered, so that no two are equal."""
    numbers = iter(range(10**6))
    return ScriptedEngine(
        lambda _request: [*probe.chat.tokenizer.encode(f"Turn {next(numbers)}."), probe.chat.stop_token_ids[0]],
        capabilities=Capabilities(abort=True, stop_strings=True),
    )


def sampled_ids(record):
    return record.response_ids[record.response_mask == 1].tolist()


def test_a_conversation_is_one_record():
    """Three turns with tool results between them are one record, which starts with the ids of the turns before."""
    replies = []

    async def converse(session):
        messages = [user("Question 0?")]
        for _ in range(3):
            replies.append(reply := await ask(session, *messages))
            messages += [as_message(reply), *results_of(reply)]

    done = run(converse, CALLING)

    assert Status.COMPLETED is done.result.status
    (record,) = done.records
    assert 3 == len(record.turns())
    assert np.concatenate([reply.token_ids for reply in replies]).tolist() == sampled_ids(record)
    assert [reply.usage.prompt_tokens for reply in replies] == [start for start, _ in record.turns()]
    assert {"calls": 3, "records_main": 1, "auxiliary_share": 0, "untrained_share": 0} == dict(done.counts)
    assert "assistant" == done.result.messages[-1]["role"]


def test_the_reply_is_read_as_the_client_gets_it():
    """Text, reasoning, calls with ids of nine characters, and exact counts are in the reply."""
    text = "<think>Two and three.</think>I add.\n" + CALLING + CALLING

    async def converse(session):
        reply = await ask(session, user("Question 0?"), logprobs=True)
        assert ("I add.\n", "Two and three.", "tool_calls") == (reply.content, reply.reasoning, reply.finish)
        assert [("add", {"a": 1, "b": 1})] * 2 == [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]
        assert ["call00100", "call00101"] == [call.id for call in reply.tool_calls]
        assert len(reply.token_ids) == reply.usage.completion_tokens == len(reply.logprobs) == len(reply.token_texts)
        assert len("Two and three.") + 1 == reply.usage.reasoning_tokens
        assert "<think>" == reply.token_texts[0]

    assert Status.COMPLETED is run(converse, text).result.status


def test_a_call_that_ends_before_its_sampling_starts_is_refused():
    """A session that closes between a call and its first step refuses the call, which would wait for ever."""

    async def scenario(session):
        call = asyncio.ensure_future(session.answer(make_call(user("Question 0?"))))
        await asyncio.sleep(0)
        session.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert call.done()
        assert "session_closed" == call.exception().kind
        assert session.is_idle

    assert Status.COMPLETED is run(scenario).result.status


def test_a_malformed_call_is_text():
    """With `malformed_calls: text` a malformed call is text for the agent, and its echo continues the record."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"))
        assert () == reply.tool_calls
        assert 'Wait <tool_call>{"name": "add"' == reply.content
        await ask(session, user("Question 0?"), as_message(reply), user("Try again."))

    assert 1 == len(run(converse, 'Wait <tool_call>{"name": "add"', malformed_calls="text").records)


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_malformed_call_may_be_a_call(dialect):
    """An agent gets a call that it cannot run, and its echo continues the record."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"), dialect=dialect)
        (call,) = reply.tool_calls
        assert ("malformed_call", "tool_calls") == (call.name, reply.finish)
        assert '{"name": "add"' in call.arguments
        assert ("Wait", call.id) == (reply.content.strip(), as_message(reply)["tool_calls"][0]["id"])
        error = results_of(reply, "Error: there is no tool malformed_call")
        again = await ask(session, user("Question 0?"), as_message(reply), *error, dialect=dialect)
        assert 1 == len(again.tool_calls)

    done = run(converse, 'Wait <tool_call>{"name": "add"')

    assert [2] == [len(record.turns()) for record in done.records]


@pytest.mark.parametrize("reasoning", [True, False])
def test_dropped_reasoning_stays_in_the_record(reasoning):
    """With `history: record`, a client that drops reasoning still continues the record that has it."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"))
        await ask(session, user("Question 0?"), as_message(reply, reasoning=reasoning), user("Go on."))

    done = run(converse, "<think>Hm.</think>Yes.")

    assert 1 == len(done.records)
    assert (not reasoning) == done.counts.get("echo_reasoning_dropped", 0)


def test_history_of_the_template_renders_what_was_sent():
    """With `history: template`, a dropped reasoning opens a record whose prompt is the template's rendering."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"))
        await ask(session, user("Question 0?"), as_message(reply, reasoning=False), user("Go on."))

    done = run(converse, "<think>Hm.</think>Yes.", history="template")
    kept = run(converse, "Yes.", history="template")

    _first, second = done.records
    expected = (
        Sessions()
        .probe()
        .chat.prompt([user("Question 0?"), {"role": "assistant", "content": "Yes."}, user("Go on.")], [ADD])
    )
    assert expected.tolist() == second.prompt_ids.tolist()
    assert 1 == done.counts["forks_history"]
    assert 1 == len(kept.records)


def test_one_changed_letter_is_a_new_record():
    """An edited turn is foreign: it is prompt in a separate record, and counted."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"))
        await ask(session, user("Question 0?"), {**as_message(reply), "content": reply.content + "!"}, user("Go on."))

    done = run(converse, "Yes.")

    assert 2 == len(done.records)
    assert [len("Yes.") + 1] * 2 == [int(record.response_mask.sum()) for record in done.records]
    assert 1 == done.counts["forks_foreign_turn"]


def test_a_fabricated_turn_is_prompt():
    """An assistant message that was never sampled is part of the prompt."""

    async def converse(session):
        await ask(session, user("Hi."), {"role": "assistant", "content": "Got it."}, user("Question 0?"))

    (record,) = run(converse).records
    assert b"Got it." in bytes(record.prompt_ids[record.prompt_ids < 256].astype(np.uint8))


def test_changed_tools_are_a_new_record():
    """A call with other tools has another prompt, so it opens a record."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"))
        await ask(session, user("Question 0?"), as_message(reply), user("Go on."), tools=())

    done = run(converse)
    assert 2 == len(done.records)
    assert 1 == done.counts["forks_tools"]


def test_an_earlier_turn_continues_in_a_branch():
    """A second continuation of a turn branches: the shared tokens are replayed and have mask 0."""
    replies = []

    async def converse(session):
        replies.append(reply := await ask(session, user("Question 0?")))
        for text in ("Go on.", "Stop."):
            replies.append(await ask(session, user("Question 0?"), as_message(reply), user(text)))

    done = run(converse, engine=numbered)

    first, second = done.records
    shared = replies[0].token_ids.tolist()
    assert shared + replies[1].token_ids.tolist() == sampled_ids(first)
    assert replies[2].token_ids.tolist() == sampled_ids(second)
    replayed = second.response_ids[second.origins == Origin.REPLAYED]
    assert shared == replayed.tolist()
    assert second.logprobs[second.origins == Origin.REPLAYED].tolist() == replies[0].logprobs.tolist()
    assert 1 == done.counts["forks_inside"]
    assert ("main", "sibling") == tuple(each.kind for each in done.result.lineage)
    assert (None, 0) == tuple(each.parent for each in done.result.lineage)


def test_an_equal_request_after_delivery_is_a_new_sample():
    """A delivered answer is not given again: an equal unmarked request is sampled anew, in a sibling."""
    replies = []

    async def converse(session):
        for _ in range(3):
            replies.append(await ask(session, user("Question 0?")))

    done = run(converse, engine=numbered)

    assert 3 == len({reply.content for reply in replies}) == len(done.records)
    assert 2 == done.counts["forks_sibling"]
    assert 3 == len({reply.id for reply in replies})


def test_equal_requests_have_different_seeds():
    """A model that follows its seed answers an equal request in another way."""

    async def converse(session):
        return await ask(session, user("Question 0?")), await ask(session, user("Question 0?"))

    seeds = []

    def engine(probe):
        def choose(request):
            seeds.append(request.sampling.seed)
            return probe.choose(request)

        return ScriptedEngine(choose)

    run(converse, engine=engine)
    run(converse, engine=engine)
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_an_undelivered_answer_goes_to_the_next_equal_request():
    """A client that breaks off gets the same turn for the same request, also without `stream`; it is sampled once."""
    replies = []

    async def converse(session):
        answer = await session.answer(make_call(user("Question 0?"), stream=True))
        answer.release()
        answer.confirm()  # too late: an answer is settled once
        replies.append(answer.reply)
        replies.append(await ask(session, user("Question 0?")))

    done = run(converse, engine=numbered)

    assert replies[0] is replies[1]
    assert 1 == len(done.run.answers) == len(done.records[0].turns())
    assert 1 == done.counts["redelivered"]


def test_an_undelivered_answer_is_dropped_when_the_session_moves_on():
    """A turn that no client has leaves no trace in the record, and its tokens are counted."""

    async def converse(session):
        answer = await session.answer(make_call(user("Question 0?"), max_tokens=100))
        answer.release()
        await ask(session, user("Question 0?"))

    done = run(converse, engine=numbered)

    (record,) = done.records
    assert 1 == len(record.turns())
    assert (1, len("Turn 0.") + 1) == (done.counts["left_calls"], done.counts["left_tokens"])


def test_an_undelivered_answer_at_the_end_is_not_trained():
    """A record whose only turn was never delivered has no trained token."""

    async def converse(session):
        (await session.answer(make_call(user("Question 0?")))).release()

    done = run(converse)

    assert 0 == int(done.records[0].response_mask.sum())
    assert (False,) == tuple(each.trained for each in done.result.lineage)


def test_an_echo_proves_the_delivery():
    """A client may send the next request before the transport has said that it read the last one."""

    async def converse(session):
        answer = await session.answer(make_call(user("Question 0?")))
        await ask(session, user("Question 0?"), as_message(answer.reply), user("Go on."))
        answer.confirm()

    done = run(converse)
    assert 2 == len(done.records[0].turns())


def test_a_request_with_the_same_key_joins_the_call_in_flight():
    """A repeated request with the same key waits for the running call; the engine samples once."""

    async def converse(session):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(session.answer(make_call(user("Question 0?"), key="a")))
            await asyncio.sleep(0)
            second = group.create_task(session.answer(make_call(user("Question 0?"), key="a")))
        assert first.result().reply is second.result().reply
        first.result().release()
        second.result().confirm()

    done = run(converse, engine=lambda probe: probe.slow_engine(0.02))
    assert 1 == len(done.run.answers) == len(done.records[0].turns())


def test_a_retry_survives_the_first_client():
    """When the first client leaves, the turn continues for the retry that has joined it."""

    async def converse(session):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(session.answer(make_call(user("Question 0?"), key="a")))
            await asyncio.sleep(0)
            second = group.create_task(session.answer(make_call(user("Question 0?"), key="a")))
            await asyncio.sleep(0)
            first.cancel()
        second.result().confirm()

    done = run(converse, engine=lambda probe: probe.slow_engine(0.02))
    assert 1 == len(done.run.answers) == len(done.records[0].turns())


def test_a_client_that_leaves_ends_the_sampling():
    """A cancelled call leaves the record as it was, and a retry continues the same record."""

    async def converse(session):
        call = asyncio.ensure_future(session.answer(make_call(user("Question 0?"))))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait({call})
        await ask(session, user("Question 0?"))

    done = run(converse, engine=lambda probe: probe.slow_engine(0.05))
    (record,) = done.records
    assert 1 == len(record.turns())


def test_the_end_of_a_session_ends_its_calls():
    """A call that is in flight when the session ends is refused, and the engine stops to sample for it."""

    async def converse(session):
        call = asyncio.ensure_future(session.answer(make_call(user("Question 0?"))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.close()
        with pytest.raises(CallRefusedError) as refused:
            await call
        assert "session_closed" == refused.value.kind

    (record,) = run(converse, engine=lambda probe: probe.slow_engine(30.0)).records
    assert 0 == record.num_response_tokens


def test_two_calls_at_once_have_records_of_their_own():
    """A title call runs beside the main call; no call waits for the other, and the title is auxiliary."""
    started = asyncio.Event()

    async def converse(session):
        async with asyncio.TaskGroup() as group:
            title = group.create_task(session.answer(make_call(user("A title, please."), tools=())))
            main = group.create_task(session.answer(make_call(user("Question 0?"))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert all(record.is_sampling for record in session.book.records)
            assert 2 == len(session.book.records)
            started.set()
        title.result().confirm()
        main.result().confirm()

    done = run(converse, engine=lambda probe: probe.slow_engine(0.02))
    assert started.is_set()
    assert ("auxiliary", "main") == tuple(each.kind for each in done.result.lineage)
    assert (False, True) == tuple(each.trained for each in done.result.lineage)
    assert 0 < done.counts["auxiliary_share"] < 1


def test_two_continuations_at_once_branch():
    """Two calls that continue one turn at the same time do not wait: the second one branches."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"))
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(session.answer(make_call(user("Question 0?"), as_message(reply), user(text))))
                for text in "ab"
            ]
        for call in calls:
            call.result().confirm()

    done = run(converse)
    assert [2, 1] == [len(record.turns()) for record in done.records]
    assert 1 == done.counts.get("forks_busy", 0) + done.counts.get("forks_inside", 0)


@pytest.mark.parametrize("echo", ["", "</code>"])
def test_a_stop_string_may_be_in_the_echo(echo):
    """The reply leaves the stop string out; an echo with or without it continues the record."""

    def engine(probe):
        turn = probe.chat.tokenizer.encode("x = 1\n</code>")
        return StoppingEngine(lambda _request: turn, capabilities=Capabilities(stop_strings=True))

    async def converse(session):
        reply = await ask(session, user("Question 0?"), stop=("</code>",))
        assert ("x = 1\n", "</code>") == (reply.content, reply.stop)
        await ask(session, user("Question 0?"), {"role": "assistant", "content": f"x = 1{echo}"}, user("Go on."))

    assert 1 == len(run(converse, engine=engine).records)


def test_a_stop_string_needs_the_engine():
    """An engine that cannot end a turn at a string refuses the call by the name of the field."""

    async def converse(session):
        with pytest.raises(CallRefusedError) as refused:
            await ask(session, user("Question 0?"), stop=("</code>",))
        assert ("unsupported", "stop") == (refused.value.kind, refused.value.param)

    assert () == run(converse).records


def test_a_cut_turn_is_closed_by_the_next():
    """`max_tokens` cuts a turn, which ends with `length`; the next request closes it."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"), max_tokens=3)
        assert ("length", 3) == (reply.finish, reply.usage.completion_tokens)
        await ask(session, user("Question 0?"), as_message(reply), user("Go on."))

    (record,) = run(converse, "Yes, and no.").records
    assert 2 == len(record.turns())


def test_a_full_context_is_said_with_its_numbers():
    """A conversation that does not fit is refused by its length, and changes no record."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"))
        with pytest.raises(CallRefusedError) as refused:
            await ask(session, user("Question 0?"), as_message(reply), user("x" * 100))
        assert "context_length_exceeded" == refused.value.kind
        assert refused.value.num_tokens > refused.value.max_tokens > 0

    done = run(converse, "Yes.", limits={"response_length": 50})
    assert 1 == len(done.records[0].segments)


@pytest.mark.parametrize("policy", ["error", "truncate_left"])
def test_a_long_prompt_is_refused_and_never_cut(policy):
    """A prompt over the limit is refused, whatever the run does with its own prompts."""

    async def converse(session):
        with pytest.raises(CallRefusedError) as refused:
            await ask(session, user("x" * 100))
        assert ("context_length_exceeded", 50) == (refused.value.kind, refused.value.max_tokens)

    done = run(converse, limits={"prompt_length": 50, "prompt_policy": policy})
    assert [] == [record for record in done.records if record.response_mask.sum()]


def test_the_session_has_a_limit_of_calls():
    """A runaway agent is refused after its calls, by the name of the limit."""

    async def converse(session):
        for _ in range(2):
            await ask(session, user("Question 0?"))
        with pytest.raises(CallRefusedError) as refused:
            await ask(session, user("Question 0?"))
        assert "budget_exhausted" == refused.value.kind
        assert refused.value is session.exhausted

    assert 2 == len(run(converse, max_calls=2).records)


def test_records_of_an_episode_are_limited():
    """The core's limit of records refuses a further conversation."""

    async def converse(session):
        await ask(session, user("Question 0?"))
        with pytest.raises(CallRefusedError) as refused:
            await ask(session, user("Question 1?"))
        assert "budget_exhausted" == refused.value.kind

    assert 1 == len(run(converse, limits={"max_records": 1}).records)


def test_a_failure_of_the_engine_is_the_engines():
    """A failed call is refused as the engine's, and so is the episode."""

    async def converse(session):
        with pytest.raises(CallRefusedError) as refused:
            await ask(session, user("Question 0?"))
        assert "engine" == refused.value.kind
        with pytest.raises(CallRefusedError) as refused:
            await ask(session, user("Question 0?"))
        assert "session_closed" == refused.value.kind

    done = run(converse, engine=lambda probe: probe.engine(failures={0: Failure.ERROR}))
    assert (Status.FAILED, "engine") == (done.result.status, done.result.fault.owner)


@pytest.mark.parametrize(("policy", "role"), [("user", "user"), ("keep", "system")])
def test_system_messages_inside_the_conversation(policy, role):
    """A system message behind the first ones gets the role that the option says."""
    messages = [{"role": "system", "content": "S."}, user("Question 0?"), {"role": "system", "content": "Note."}]

    async def converse(session):
        reply = await ask(session, *messages)
        await ask(session, *messages, as_message(reply), user("Go on."))

    done = run(converse, mid_system=policy)
    expected = Sessions().probe().chat.prompt([*messages[:2], {"role": role, "content": "Note."}], [ADD])
    assert expected.tolist() == done.records[0].prompt_ids.tolist()
    assert 1 == len(done.records)


def test_system_messages_can_be_refused():
    """`mid_system: refuse` names the message."""

    async def converse(session):
        with pytest.raises(CallRefusedError) as refused:
            await ask(session, user("Question 0?"), {"role": "system", "content": "Note."})
        assert ("invalid", "messages[1]") == (refused.value.kind, refused.value.param)

    run(converse, mid_system="refuse")


@pytest.mark.parametrize("method", ["answer", "count_tokens"])
def test_arguments_that_are_nested_too_deeply_are_refused(method):
    """A foreign turn whose arguments cannot be rendered is refused as invalid, and the next call is served."""
    arguments = '{"a":' * 495 + "1" + "}" * 495
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}

    async def converse(session):
        with pytest.raises(CallRefusedError) as refused:
            await getattr(session, method)(make_call(user("Question 0?"), turn, user("Go on.")))
        assert ("invalid", "messages") == (refused.value.kind, refused.value.param)
        await ask(session, user("Question 0?"))

    assert 1 == len(run(converse).records)


def test_counted_tokens_are_those_of_the_next_call():
    """`count_tokens` equals the usage of the call, for a new conversation and a known one, and records nothing."""

    async def converse(session):
        messages = [user("Question 0?")]
        for _ in range(2):
            counted = await session.count_tokens(make_call(*messages))
            reply = await ask(session, *messages)
            assert counted == reply.usage.prompt_tokens
            messages += [as_message(reply), user("Go on.")]

    assert 1 == len(run(converse).records)


def test_wishes_and_ignored_fields_are_counted():
    """The run's sampling wins; requested_sampling of the agent and fields without effect are counted by name."""

    async def converse(session):
        await ask(
            session,
            user("Question 0?"),
            requested_sampling={"temperature": 0.1},
            ignored=("user",),
            constraints=(Constraint(kind="required", param="tool_choice"),),
        )

    counts = run(converse).counts
    assert (1, 1, 1) == (counts["ignored_temperature"], counts["ignored_user"], counts["wished_tool_choice_required"])


def test_hidden_tools_are_not_in_the_prompt():
    """`tool_choice: none` hides the tools, so the prompt has none and no call is read."""

    async def converse(session):
        reply = await ask(session, user("Question 0?"), tool_choice="none")
        assert (CALLING, ()) == (reply.content, reply.tool_calls)

    (record,) = run(converse, CALLING).records
    assert Sessions().probe().chat.prompt([user("Question 0?")]).tolist() == record.prompt_ids.tolist()


def test_tools_of_results_are_named_as_soon_as_they_are_known():
    """A result whose call was not known gets the name of its tool in a later request of the same conversation."""
    result = {"role": "tool", "tool_call_id": "late", "content": "5"}

    async def scenario(session):
        book, call = session.book, make_call(user("Hi."), result)
        assert [user("Hi."), result] == list(book.prepare(call).messages)
        book.name_call("late", "add")
        longer = make_call(user("Hi."), result, user("Go on."))
        assert [user("Hi."), {**result, "name": "add"}, user("Go on.")] == list(book.prepare(longer).messages)
        await ask(session, user("Hi."))

    Sessions().run(scenario)


def test_refused_requests_leave_nothing():
    """Tools of a conversation that does not fit are not kept, nor are all the names that an agent invents."""

    async def converse(session):
        for number in range(3):
            tool = {"type": "function", "function": {"name": f"t{number}", "description": "It adds. " * 200}}
            fields = tuple(f"x{number}.{index}" for index in range(50))
            with pytest.raises(CallRefusedError):
                await ask(session, user("long " * 500), tools=(tool,), ignored=fields)
        assert session.book.tree("")._roots == {}

    done = Sessions().run(converse, limits={"prompt_length": 256, "response_length": 256})

    names = [name for name in done.counts if name.startswith("ignored_")]
    assert len(names) == 65
    assert done.counts["ignored_other"] == 150 - 64


def test_no_call_counts_after_the_end_of_the_program():
    """A call in flight is refused at the end, as are later ones; an answer on its way is delivered and counts."""
    refusals = []

    async def converse(session):
        delivered = await session.answer(make_call(user("Question 0?")))

        async def ask_late(number):
            with pytest.raises(CallRefusedError) as refused:
                await session.answer(make_call(user(f"Question {number}?")))
            refusals.append(refused.value.kind)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask_late(1))
            while not session._kept.in_flight:  # noqa: ASYNC110 - a session tells nobody
                await asyncio.sleep(0)
            session.refuse_calls()
            await ask_late(2)
        delivered.confirm()

    done = run(converse, engine=lambda probe: probe.engine(latency_s=0.01))

    assert refusals == ["session_closed", "session_closed"]
    assert [1] == [len(record.turns()) for record in done.records if record.turns()]
