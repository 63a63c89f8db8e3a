"""Unmodified clients, each in a separate environment: tool loops, refusals, and streams that break."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from session_scenarios import Sessions, serve_program

from turnwise import Status, ToolResult
from turnwise_gateway.calls import CallOfTool
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine

CLIENTS = Path(__file__).parent / "clients"
RUNS = [
    *(
        (name, dialect)
        for name in ("langchain", "openai_agents", "openai_js", "ai_sdk")
        for dialect in ("chat", "responses")
    ),
    *(("pydantic_ai", dialect) for dialect in ("chat", "messages", "responses")),
    ("litellm", "chat"),
]
REFUSED = [*RUNS, ("smolagents", "chat")]
SMOLAGENTS_TURNS = [
    "<think>\nTwo sums.\n</think>\nLet me add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"b": 2.0, "a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 4}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"b": 5, "a": 5}}\n</tool_call>',
    '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "3 and 10"}}\n</tool_call>',
]
ARGUMENTS = '{"b":  2.0, "a": 1}'

pytestmark = pytest.mark.slow


@pytest.fixture
def run(installed):
    """Runs the agent of a client, and returns its answer or its error."""

    def start(gateway, name, dialect, stream):
        folder = installed(name)
        arguments = [gateway.url, gateway.key, dialect, "stream" if stream else "plain"]
        command = ["node", str(CLIENTS / f"{name}_client.mjs")]
        if (folder / "bin/python").is_file():
            command = [str(folder / "bin/python"), str(CLIENTS / f"{name}_client.py")]
        done = subprocess.run(
            [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])

    return start


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "dialect"), RUNS)
def test_tool_loop(gateway, make_reply, run, name, dialect, stream):
    """A client calls its tool, sends back the turn and the result under the call's id, and ends with the answer."""
    call = CallOfTool(id="Ab3dEf6hi", name="add", arguments=ARGUMENTS)
    turns = [
        make_reply(
            id="t1", content="Let me add.", reasoning="Hm.", signature="sig", tool_calls=(call,), finish="tool_calls"
        ),
        make_reply(id="t2", content="The sum is 3."),
    ]
    gateway.backend.script = lambda _call: turns.pop(0)

    result = run(gateway, name, dialect, stream)

    assert {"answer": "The sum is 3."} == result
    assert ["confirmed", "confirmed"] == [gateway.backend.outcome(), gateway.backend.outcome()]
    first, second = gateway.backend.calls
    assert (stream, stream) == (first.stream, second.stream)
    assert ["add"] == [tool["function"]["name"] for tool in first.tools]
    assert first.messages == second.messages[: len(first.messages)]
    # The default model of this client names items, whatever `store` of the reply says.
    assert ((name, dialect) == ("ai_sdk", "responses")) == (b"item_reference" in second.body)
    result_of_tool = second.messages[-1]
    assert ("tool", "Ab3dEf6hi") == (result_of_tool["role"], result_of_tool["tool_call_id"])
    assert 3.0 == float(result_of_tool["content"])
    echoed = [each for message in second.messages for each in message.get("tool_calls", ())]
    assert ["Ab3dEf6hi"] == [each["id"] for each in echoed]
    assert json.loads(ARGUMENTS) == json.loads(echoed[0]["function"]["arguments"])
    assert any("Let me add." in message["content"] for message in second.messages)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "dialect"), REFUSED)
@pytest.mark.parametrize("kind", ["session_closed", "context_length_exceeded"])
def test_refusal_ends_the_client(gateway, refused, run, name, dialect, stream, kind):
    """A refused client makes one call, and ends with an error."""
    gateway.backend.script = lambda _call: refused(kind, "It is over.", num_tokens=5000, max_tokens=4096)

    result = run(gateway, name, dialect, stream)

    assert ["error"] == list(result)
    assert 1 == len(gateway.backend.calls)


@pytest.mark.parametrize(("name", "dialect"), REFUSED)
def test_broken_stream_is_no_answer(serve, refused, run, name, dialect):
    """A stream that fails after heartbeats is an error of the client, never an answer."""
    gateway = serve(heartbeat_s=0.02)
    gateway.backend.delay_s = 0.3
    gateway.backend.script = lambda _call: refused("engine", "The engine failed.")

    result = run(gateway, name, dialect, True)

    assert ["error"] == list(result)


def test_tools_reach_a_client_of_the_context_protocol(gateway, installed):
    """The client of the package `mcp` lists the run's tools and calls them; a failed call is a result, too."""
    command = [str(installed("mcp") / "bin/python"), str(CLIENTS / "mcp_client.py")]
    gateway.backend.tool_script = lambda call: (
        ToolResult(text=str(call.arguments["a"] + call.arguments["b"]))
        if call.name == "add"
        else ToolResult(text="Error: there is no such tool", error=True)
    )

    done = subprocess.run(
        [*command, f"{gateway.url}/mcp", gateway.key], capture_output=True, text=True, timeout=120, check=True
    )

    assert {
        "version": "2025-11-25",
        "tools": ["add"],
        "required": ["a", "b"],
        "good": [False, "3"],
        "bad": [True, "Error: there is no such tool"],
        "code": -32601,
    } == json.loads(done.stdout)


@pytest.mark.parametrize("stream", ["plain", "stream"])
def test_a_conversation_of_smolagents_is_one_record(installed, stream):
    """smolagents sends calls back as text, and results as words of the user: still its conversation is one record."""
    command = [str(installed("smolagents") / "bin/python"), str(CLIENTS / "smolagents_client.py")]
    output = []

    def make_engine(probe):
        encode, stop = probe.chat.tokenizer.encode, probe.chat.stop_token_ids[0]
        (start,) = encode("<|im_start|>")

        def choose(request):
            # The first request has a system prompt, the task, and the start of the answer.
            number = (np.count_nonzero(request.token_ids == start) - 3) // 2
            return [*encode(SMOLAGENTS_TURNS[number]), stop]

        return ScriptedEngine(choose, capabilities=evolve(SCRIPTED_CAPABILITIES, stop_strings=True))

    async def scenario(session):
        output.append(await serve_program(session, *command, ways=("chat", stream)))

    done = Sessions().run(scenario, engine=make_engine)

    assert output[0].endswith('{"answer": "3 and 10"}'), "behind the text of the stream, on the same line"
    assert Status.COMPLETED is done.result.status
    (record,) = done.records
    turns = [record.input_ids[start:end].tolist() for start, end in record.turns()]
    assert [each.token_ids.tolist() for each in done.run.answers] == turns
    assert (3, 2) == (len(turns), done.counts["echo_calls_as_text"])


@pytest.mark.parametrize("stream", ["plain", "stream"])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_conversation_of_a_code_agent_is_one_record(installed, stream, is_closed):
    """A CodeAgent puts its stop string behind each turn, also behind one that ended without it."""
    command = [str(installed("smolagents") / "bin/python"), str(CLIENTS / "smolagents_code_client.py")]
    end = "\n</code>" if is_closed else ""
    texts = [f"<think>\nA sum.\n</think>\nThought: é\n<code>\nx = 1 + 2\nprint({each!r}, x){end}" for each in "abc"]
    texts += [f'Thought: It is known.\n<code>\nfinal_answer("The sum is 3."){end}']
    output, left = [], list(texts)

    def make_engine(probe):
        encode, stop = probe.chat.tokenizer.encode, probe.chat.stop_token_ids[0]

        def choose(_request):
            text = left.pop(0)
            return [*encode(text), *(() if is_closed else [stop])]

        return ScriptedEngine(choose, capabilities=evolve(SCRIPTED_CAPABILITIES, stop_strings=True))

    async def scenario(session):
        output.append(await serve_program(session, *command, ways=("chat", stream)))

    done = Sessions().run(scenario, engine=make_engine)

    assert output[0].endswith('{"answer": "The sum is 3."}')
    assert Status.COMPLETED is done.result.status
    (record,) = done.records
    turns = [record.input_ids[start:end].tolist() for start, end in record.turns()]
    assert [each.token_ids.tolist() for each in done.run.answers] == turns
    assert len(texts) == len(turns)
