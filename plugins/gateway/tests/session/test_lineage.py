"""Tests of the kinds and parents of records."""

import asyncio
import itertools
import json

import pytest
from session_scenarios import Sessions, as_message, make_call, results_of, user

from turnwise_testing.engines.scripted import ScriptedEngine

SUMMARY = "A summary of all that was done so far."
CALLING = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'


async def ask(session, *messages, **changes):
    answer = await session.answer(make_call(*messages, **changes))
    answer.confirm()
    return answer.reply


def lineage(scenario, *turns, **options):
    """Return the kind, label, parent and training of each record."""
    done = Sessions(turns or (CALLING,)).run(scenario, **options)
    return [(each.kind, each.label, each.parent, each.trained) for each in done.result.lineage], done


def summarising(probe, summary=SUMMARY):
    """Return an engine that writes a summary where it is asked for one, and a call elsewhere."""
    encode, stop = probe.chat.tokenizer.encode, probe.chat.stop_token_ids[0]

    def choose(request):
        text = bytes(int(token_id) for token_id in request.token_ids if token_id < 256).decode()
        return [*encode(summary if text.rstrip().endswith("Summarise.\nassistant") else CALLING), stop]

    return ScriptedEngine(choose)


def test_sub_agents_of_claude_code():
    """Claude Code names its sub-agents, nested ones included, and their parents."""

    async def work(session):
        await ask(session, user("Question 0?"))
        await ask(session, user("Part."), headers={"x-claude-code-agent-id": "a1"})
        headers = {"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}
        await ask(session, user("Part of the part."), headers=headers)

    assert [("main", "", None, True), ("subagent", "a1", 0, True), ("subagent", "a2", 1, True)] == lineage(work)[0]


def test_sub_agents_of_opencode():
    """opencode names the session that started a sub-agent."""

    async def work(session):
        await ask(session, user("Part."), headers={"x-session-id": "s2", "x-parent-session-id": "s1"})
        await ask(session, user("Question 0?"), headers={"x-session-id": "s1"})

    assert [("subagent", "s2", 1, True), ("main", "", None, True)] == lineage(work)[0]


def test_sub_agents_of_codex():
    """Codex names each thread; that of the task is called `/root`."""

    def headers(thread, name):
        metadata = {"thread_id": thread, "agent_name": name, "request_kind": "turn"}
        return {"x-codex-turn-metadata": json.dumps(metadata)}

    async def work(session):
        await ask(session, user("Question 0?"), headers=headers("t1", "/root"))
        await ask(session, user("Part."), headers=headers("t2", "/root/part"))

    assert [("main", "", None, True), ("subagent", "t2", 0, True)] == lineage(work)[0]


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({"x-claude-code-agent-id": "a1"}, "subagent"),
        ({"x-claude-code-agent-id": "a1", "x-claude-code-parent-agent-id": "a1"}, "subagent"),
        ({"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}, "compaction"),
    ],
)
def test_a_session_with_one_record_has_no_parent(headers, kind):
    """The one record of a session is not its own parent, whatever its headers say."""

    async def work(session):
        await ask(session, user("Question 0?"), headers=headers)

    ((found, _, parent, _),) = lineage(work)[0]
    assert (kind, None) == (found, parent)


def test_compaction_of_codex():
    """Codex names its summaries: the same history with an instruction and without tools, then a new conversation."""
    metadata = {"x-codex-turn-metadata": json.dumps({"thread_id": "t", "request_kind": "compaction"})}

    async def work(session, headers):
        reply = await ask(session, user("Question 0?"))
        history = [user("Question 0?"), as_message(reply), *results_of(reply)]
        reply = await ask(session, *history, user("Summarise."), tools=(), headers=headers)
        assert SUMMARY == reply.content
        await ask(session, user("Question 0?"), user(f"So far: {reply.content}"))

    for headers in (metadata, {}):
        kinds, done = lineage(lambda session, given=headers: work(session, given), engine=summarising)
        assert ["main", "compaction", "main"] == [kind for kind, *_ in kinds]
        assert [True] * 3 == [trained for *_, trained in kinds]
        prompt = done.records[2].prompt_ids
        assert SUMMARY.encode() in bytes(prompt[prompt < 256].astype("uint8"))
        assert 1 == len(done.records[1].turns())


def test_compaction_by_a_call_apart():
    """opencode and pi summarise in a conversation apart, and start anew with the summary as the model's message."""

    async def work(session):
        await ask(session, {"role": "system", "content": "S."}, user("Question 0?"))
        summary = await ask(session, user("The transcript. Summarise."), tools=())
        system = {"role": "system", "content": "S."}
        await ask(session, system, {"role": "assistant", "content": summary.content}, user("Go on."))

    kinds, _ = lineage(work, engine=summarising)
    assert [("main", None), ("compaction", 0), ("main", 1)] == [(kind, parent) for kind, _, parent, _ in kinds]


async def talk(session, *messages, turns):
    """Have a conversation of some turns, and return its messages."""
    history = list(messages)
    for _ in range(turns):
        reply = await ask(session, *history)
        history += [as_message(reply), *results_of(reply)]
    return history


@pytest.mark.parametrize("num_turns", [(3, 1), (2, 3)])
@pytest.mark.parametrize("way", ["apart", "branch", "same"])
@pytest.mark.parametrize("quoted", ["all", "part"])
def test_compaction_without_headers(num_turns, way, quoted):
    """
    The conversation goes on after its summary, whichever part is longer, and its end is that of the episode.

    Claude Code asks for the summary in a branch and with its tools, Qwen Code without them; both ask for tags, and
    leave some of the text out when they quote it.
    """
    summary = f"<analysis>\nI looked at it.\n</analysis>\n<summary>\n{SUMMARY}\n</summary>"
    system, asked = {"role": "system", "content": "S."}, user("Summarise.")

    async def work(session):
        history = await talk(session, system, user("Question 0?"), turns=num_turns[0])
        if way == "apart":
            await ask(session, {"role": "system", "content": "You summarise."}, user("All of it."), asked, tools=())
        else:
            await ask(session, *(history if way == "same" else history[:-2]), asked)
        told = summary if quoted == "all" else f"Summary:\n{SUMMARY}\nGo on."
        await talk(session, system, user(told), turns=num_turns[1])

    kinds, done = lineage(work, engine=lambda probe: summarising(probe, summary))
    expected = [("main", None), ("main", 0)] if way == "same" else [("main", None), ("compaction", 0), ("main", 1)]
    assert expected == [(kind, parent) for kind, _, parent, _ in kinds]
    assert "compaction" == kinds[-1][1]
    assert SUMMARY in done.result.messages[1]["content"]


@pytest.mark.parametrize("num_turns", [(2, 2), (1, 4)])
def test_a_conversation_that_an_agent_resumes_with_other_notes(num_turns):
    """Qwen Code writes other notes before a conversation that it continues: both parts are the main one."""

    async def work(session):
        history = await talk(session, user("Notes."), user("Question 0?"), turns=num_turns[0])
        await talk(session, user("Part."), turns=1)
        await talk(session, user("New notes."), *history[1:], user("Go on."), turns=num_turns[1])

    kinds, done = lineage(work)
    assert ["main", "subagent", "main"] == [kind for kind, *_ in kinds]
    assert "New notes." == done.result.messages[0]["content"]


def test_a_sub_agent_without_headers_that_summarises():
    """Its conversation after the summary is still that of a sub-agent."""
    worker = {"role": "system", "content": "You are a part."}

    async def work(session):
        await talk(session, {"role": "system", "content": "S."}, user("Question 0?"), turns=4)
        await ask(session, worker, user("Part."))
        summary = await ask(session, worker, user("Part."), user("Summarise."), tools=())
        await ask(session, worker, user(f"So far: {summary.content}"))

    kinds, _ = lineage(work, engine=summarising)
    assert ["main", "subagent", "compaction", "subagent"] == [kind for kind, *_ in kinds]


def test_a_result_that_another_agent_gets_is_no_summary():
    """An agent with other instructions that quotes a turn is a sub-agent, and the turn stays what it was."""

    async def work(session):
        plan = await ask(session, {"role": "system", "content": "You plan."}, user("Question 0?"), user("Summarise."))
        assert SUMMARY == plan.content
        await ask(session, {"role": "system", "content": "You do."}, user(f"The plan: {plan.content}"))

    kinds, _ = lineage(work, engine=summarising)
    assert {"main", "subagent"} == {kind for kind, *_ in kinds}


@pytest.mark.parametrize("option", [True, False])
def test_kinds_are_trained_by_option(option):
    """`train` decides for each kind; auxiliary calls are not trained unless it says so."""
    from turnwise_gateway.session.options import TrainedKinds

    async def work(session):
        await ask(session, user("A title, please."), tools=())
        reply = await ask(session, user("Question 0?"))
        for text in "ab":
            await ask(session, user("Question 0?"), as_message(reply), user(text))

    kinds, done = lineage(work, train=TrainedKinds(auxiliary=option, main=not option))
    assert [("auxiliary", option), ("main", not option), ("sibling", not option)] == [
        (kind, trained) for kind, _, _, trained in kinds
    ]
    share = done.counts["auxiliary_share"]
    assert 0 < share < 1
    assert pytest.approx(1 - share if option else share) == done.counts["untrained_share"]


def test_an_edited_conversation_is_still_the_main_one():
    """A record that was opened because of a changed turn has the kind of its conversation."""

    async def work(session):
        await ask(session, user("Question 0?"))
        await ask(session, user("Question 0?"), {"role": "assistant", "content": "Changed."}, user("Go on."))

    kinds, _ = lineage(work)
    assert [("main", ""), ("main", "foreign_turn")] == [(kind, label) for kind, label, *_ in kinds]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nothing_depends_on_the_order_of_arrival(order):
    """A title, the task and a sub-agent give the same records with the same kinds, whichever call comes first."""
    headers = {"x-claude-code-agent-id": "a1"}
    calls = [
        make_call(user("A title, please."), tools=()),
        make_call(user("Question 0?")),
        make_call(user("Part."), headers=headers),
    ]

    async def work(session, order):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(session.answer(calls[index])) for index in order]
        for task in tasks:
            task.result().confirm()

    def records(order):
        sessions = Sessions()
        done = sessions.run(lambda session: work(session, order))
        described = zip(done.records, done.result.lineage, strict=True)
        return {(each.kind, each.label, each.trained, tuple(record.input_ids.tolist())) for record, each in described}

    assert records(range(3)) == records(order)
