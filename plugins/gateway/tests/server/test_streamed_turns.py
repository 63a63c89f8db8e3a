"""Clients send back streamed turns with several calls, texts between them, and mistakes; the record continues."""

import asyncio
import json

import pytest
from attrs import evolve
from call_streams import WRITE, CallSessions, HeldEngine, read_session
from session_scenarios import ADD, user

from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs.tokenizers import byte_tokenizer


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WRITTEN, ADDED = '{"text":  "é", "n": 1.0}', '{"a": 1}'
PARALLEL = f"First. {call('write', WRITTEN)}\n{call('add', ADDED)} And then."
BROKEN = 'I write. <tool_call>\n{"name": "write", "arguments": {"text": "one two", oops}}\n</tool_call>'
CUT = 'I write. <tool_call>\n{"name": "write", "arguments": {"text": "one'
TURNS = {
    "parallel": (PARALLEL, [WRITTEN, ADDED], "First.  And then."),
    "broken": (BROKEN, ['{"text": "one two", oops}}\n'], "I write."),
    "cut": (CUT, ['{"text": "one'], "I write."),
    "twice": (call("add", ADDED) * 2, [ADDED] * 2, ""),
}
"""Each turn, the arguments of its calls, and its content."""


class EachTokenEngine(HeldEngine):
    """Lets a listener hear one token after the other."""

    async def generate(self, request):
        result = await self.engine.generate(evolve(request, on_tokens=None))
        for token_id in result.token_ids.tolist():
            if request.on_tokens is not None:
                request.on_tokens([token_id])
                await asyncio.sleep(0)
        return result


async def converse_by_chat(client):
    """Two turns, with the results of the calls of the first one; returns the arguments and the text of the first."""
    request = {"model": "tiny", "tools": [WRITE, ADD]}
    async with client.chat.completions.stream(messages=[user("Go.")], **request) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    calls = message.tool_calls
    results = [{"role": "tool", "tool_call_id": each.id, "content": "ok"} for each in calls]
    echo = message.to_dict()
    for each in echo["tool_calls"]:
        each["function"].pop("parsed_arguments", None)
    async with client.chat.completions.stream(messages=[user("Go."), echo, *results], **request) as stream:
        await stream.get_final_completion()
    return [each.function.arguments for each in calls], message.content or ""


async def converse_by_responses(client):
    request = {"model": "tiny", "tools": [{"type": "function", **each["function"]} for each in (WRITE, ADD)]}
    async with client.responses.stream(input=[user("Go.")], **request) as stream:
        final = await stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": each.call_id, "output": "ok"} for each in calls]
    echo = [item.to_dict() for item in final.output]
    async with client.responses.stream(input=[user("Go."), *echo, *results], **request) as stream:
        await stream.get_final_response()
    return [each.arguments for each in calls], final.output_text


async def converse_by_messages(client):
    tools = [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]} for each in (WRITE, ADD)
    ]
    request = {"model": "tiny", "max_tokens": 999, "tools": tools}
    async with client.messages.stream(messages=[user("Go.")], **request) as stream:
        final = await stream.get_final_message()
    calls = [block for block in final.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": each.id, "content": "ok"} for each in calls]
    echo = {"role": "assistant", "content": [block.to_dict() for block in final.content]}
    messages = [user("Go."), echo, {"role": "user", "content": results}]
    async with client.messages.stream(messages=messages, **request) as stream:
        await stream.get_final_message()
    written = [each.input.get("INVALID_JSON") or json.dumps(each.input, ensure_ascii=False) for each in calls]
    return written, "".join(block.text for block in final.content if block.type == "text")


CLIENTS = {"chat": converse_by_chat, "responses": converse_by_responses, "messages": converse_by_messages}


@pytest.mark.many_cases
@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.parametrize("name", TURNS)
def test_an_echo_of_a_streamed_turn_continues_its_record(name, dialect):
    """The record has all calls, mistakes included, and both turns."""
    text, arguments, content = TURNS[name]
    chat, found = ChatTemplate(byte_tokenizer()), []

    def make_engine(_probe):
        turns = iter([[*chat.tokenizer.encode(each), chat.stop_token_ids[0]] for each in (text, "Done.")])
        return EachTokenEngine(ScriptedEngine(lambda _request: next(turns)), 0)

    async def converse(session):
        found.extend(await read_session(session, dialect, CLIENTS[dialect]))

    done = CallSessions((text, "Done."), {}, chat, "hermes").run(converse, engine=make_engine)

    (read, said), reply = found
    assert arguments == [each.arguments for each in reply.tool_calls]
    if dialect == "messages" and name == "parallel":
        read, arguments = map(json.loads, read), [json.loads(each) for each in arguments]
    assert arguments == list(read)
    assert content == said.strip()
    assert [2] == [len(record.turns()) for record in done.records]
    assert {"echo_arguments"} >= {each for each in done.counts if each.startswith("echo_")} - {"echo_whitespace"}
