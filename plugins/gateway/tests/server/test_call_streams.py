"""The vendors' clients read the arguments of a call while the engine samples them."""

import json

import pytest
from attrs import define, field
from call_streams import WRITE, CallSessions, HeldEngine, read_session
from session_scenarios import user

from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs.tokenizers import byte_tokenizer

TURNS = {
    "hermes": (
        'I write. <tool_call>\n{"name": "write", "arguments": {"text":  "one',
        ' two",  "n":  1}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "I write. <tool_call>\n<function=write>\n<parameter=text>\none",
        " two\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "I write. <tool_call>write\n<arg_key>text</arg_key>\n<arg_value>one",
        " two</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    ),
    "llama4_pythonic": ("I write. <|python_start|>[write(text='one", " two', n=1)]<|python_end|>"),
    "llama3_json": ('I write. <|python_tag|>{"name": "write", "parameters": {"text": "one', ' two", "n": 1}}'),
    "mistral": ('I write. [TOOL_CALLS]write[ARGS]{"text": "one', ' two", "n": 1}'),
    "deepseek_v3": (
        'I write. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{"text": "one',
        ' two", "n": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "kimi_k2": (
        "I write. <|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
        '{"text": "one',
        ' two", "n": 1}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "gpt_oss": (
        'I write. <|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"text": "one',
        ' two", "n": 1}<|call|>',
    ),
    "granite": ('I write. <|tool_call|>[{"name": "write", "arguments": {"text": "one', ' two", "n": 1}}]'),
    "phi4": ('I write. functools[{"name": "write", "arguments": {"text": "one', ' two", "n": 1}}]'),
}
"""Each format: a turn up to the middle of its arguments, and the rest."""
ARGUMENTS = {"text": "one two", "n": 1}


@define
class Read:
    """
    What a client has read of a call.

    Attributes:
        before: kinds of the events before the first delta of the arguments.
        deltas: of the arguments.
        name: of the tool.
        id: of the call.
    """

    before: list = field(factory=list)
    deltas: list = field(factory=list)
    name: str = ""
    id: str = ""


async def read_chat(client, read, note):
    request = {"model": "tiny", "messages": [user("Write.")], "tools": [WRITE]}
    async with client.chat.completions.stream(**request) as stream:
        async for event in stream:
            if event.type == "chunk":
                for call in event.chunk.choices[0].delta.tool_calls or ():
                    read.id, read.name = call.id or read.id, call.function.name or read.name
            note(event.type, event.arguments_delta if event.type.endswith("arguments.delta") else "")
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    return final.choices[0].message.content, call.id, json.loads(call.function.arguments)


async def read_responses(client, read, note):
    tool = {"type": "function", **WRITE["function"]}
    numbers = []
    async with client.responses.stream(model="tiny", input="Write.", tools=[tool]) as stream:
        async for event in stream:
            numbers.append(event.sequence_number)
            if event.type == "response.output_item.added" and event.item.type == "function_call":
                read.id, read.name = event.item.call_id, event.item.name
            note(event.type, event.delta if event.type == "response.function_call_arguments.delta" else "")
        final = await stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert "response.output_text.done" in read.before
    assert read.before.index("response.output_item.done") < len(read.before) - 1
    (call,) = [item for item in final.output if item.type == "function_call"]
    return final.output_text, call.call_id, json.loads(call.arguments)


async def read_messages(client, read, note):
    tool = {"name": "write", "input_schema": WRITE["function"]["parameters"]}
    request = {"model": "tiny", "max_tokens": 999, "messages": [user("Write.")], "tools": [tool]}
    async with client.messages.stream(**request) as stream:
        async for event in stream:
            if event.type == "content_block_start" and event.content_block.type == "tool_use":
                read.id, read.name = event.content_block.id, event.content_block.name
            note(event.type, event.partial_json if event.type == "input_json" else "")
        final = await stream.get_final_message()
    assert read.before.index("content_block_stop") < len(read.before) - 1
    text, call = final.content
    return text.text, call.id, call.input


READERS = {"chat": read_chat, "responses": read_responses, "messages": read_messages}


@pytest.mark.many_cases(12)
@pytest.mark.parametrize("dialect", READERS)
@pytest.mark.parametrize("name", TURNS)
def test_arguments_arrive_before_the_last_token(name, dialect):
    """The engine samples the end of a call only when the client has a part of its arguments."""
    start, rest = TURNS[name]
    chat, read, found = ChatTemplate(byte_tokenizer()), Read(), []
    engines = []

    def make_engine(_probe):
        encode = chat.tokenizer.encode
        scripted = ScriptedEngine(lambda _request: [*encode(start + rest), chat.stop_token_ids[0]])
        engines.append(HeldEngine(scripted, len(encode(start))))
        return engines[0]

    def note(kind, delta):
        if not read.deltas:
            read.before.append(kind)
        if delta:
            assert read.deltas or not engines[0].has_ended
            read.deltas.append(delta)
            if "one" in "".join(read.deltas):
                engines[0].continues.set()

    async def converse(session):
        found.extend(await read_session(session, dialect, lambda client: READERS[dialect](client, read, note)))

    sessions = CallSessions((start + rest,), {"split": None}, chat, name)
    sessions.run(converse, engine=make_engine)

    (text, call_id, arguments), reply = found
    (call,) = reply.tool_calls
    assert ("I write.", ARGUMENTS) == (text.strip(), arguments)
    assert (call.id, "write") == (read.id, read.name)
    assert call.id == call_id
    assert len(read.deltas) > 1
    assert call.arguments == "".join(read.deltas)
    assert call.arguments in start + rest or name in ("qwen3_coder", "glm45", "llama4_pythonic")
