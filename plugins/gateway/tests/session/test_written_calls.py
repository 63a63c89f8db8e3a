"""Conversations of clients that write the turns of the model anew are one record each."""

import json

import pytest
from attrs import evolve
from session_scenarios import Sessions, as_message, make_call, user

from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine

SPACED = '<tool_call>\n{{"name":  "add", "arguments":  {{"b":  {0}.0,"a":  {0}}}}}\n</tool_call>'
TURNS = (*(f"Step {number}.\n{SPACED.format(number)}" for number in range(3)), "Done.")


def make_engine(probe):
    """An engine that samples the next of the turns."""
    encode, stop = probe.chat.tokenizer.encode, probe.chat.stop_token_ids[0]
    turns = iter(TURNS)
    return ScriptedEngine(lambda _request: [*encode(next(turns)), stop])


def write_anew(content):
    """The text of a turn as Qwen-Agent writes it: the call taken out, and its JSON as Python writes it."""
    before, _, rest = content.partition("<tool_call>\n")
    value = json.loads(rest.partition("\n</tool_call>")[0]) if rest else None
    return content if value is None else f"{before}<tool_call>\n{json.dumps(value)}\n</tool_call>"


@pytest.mark.parametrize("with_tools", [False, True])
def test_calls_in_the_text_of_a_client_without_tools(with_tools):
    """A client that has the tools in its own prompt sends calls as text: each turn continues the record."""
    tools = {} if with_tools else {"tools": ()}

    async def converse(session):
        messages = [user("Add.")]
        for _ in TURNS:
            answer = await session.answer(make_call(*messages, **tools))
            answer.confirm()
            reply = as_message(answer.reply)
            calls = reply.pop("tool_calls", ())
            assert bool(calls) is (with_tools and answer.reply.content != "Done.")
            shown = "".join(
                f'<tool_call>\n{{"name": "add", "arguments": {each["function"]["arguments"]}}}\n</tool_call>'
                for each in calls
            )
            reply["content"] = write_anew(reply["content"] + shown)
            messages += [reply, user("<tool_response>\n5\n</tool_response>")]

    done = Sessions().run(converse, engine=make_engine)

    assert [4] == [len(record.turns()) for record in done.records]
    assert (3, 0) == (done.counts["echo_calls_as_text"], done.counts.get("forks_foreign_turn", 0))


def test_an_echo_with_another_stop_string_of_its_request():
    """smolagents' CodeAgent closes the code of each turn, also of one that the end-of-turn token has ended."""
    stops = ("Observation:", "Calling tools:", "</code>")

    async def converse(session):
        messages = [user("Compute.")]
        for _ in TURNS:
            answer = await session.answer(make_call(*messages, tools=(), stop=stops))
            answer.confirm()
            messages += [{"role": "assistant", "content": f"{answer.reply.content}</code>"}, user("Observation: 5")]

    def make(probe):
        turn = [*probe.chat.tokenizer.encode("\nAll done é. \n"), probe.chat.stop_token_ids[0]]
        return ScriptedEngine(lambda _: turn, capabilities=evolve(SCRIPTED_CAPABILITIES, stop_strings=True))

    done = Sessions().run(converse, engine=make)

    assert [4] == [len(record.turns()) for record in done.records]
    assert 3 == done.counts["echo_stop_string"]
