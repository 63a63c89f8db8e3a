"""Unmodified clients, each in an environment of its own: tool loops, refusals, and streams that break."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise import ToolResult
from turnwise_gateway.calls import CallOfTool

CLIENTS = Path(__file__).parent / "clients"
RUNS = [
    *((name, dialect) for name in ("langchain", "openai_agents", "openai_js") for dialect in ("chat", "responses")),
    *(("pydantic_ai", dialect) for dialect in ("chat", "messages", "responses")),
]
ARGUMENTS = '{"b":  2.0, "a": 1}'

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed():
    """Installs a client, once for all tests, and returns its folder; skips the test if that fails."""
    found = {}

    def install(name):
        if name not in found:
            command = [sys.executable, str(CLIENTS / "install.py"), name]
            found[name] = subprocess.run(command, capture_output=True, text=True, check=False)
        if found[name].returncode:
            pytest.skip(f"cannot install {name}: {found[name].stderr[-300:]}")
        return Path(found[name].stdout.strip())

    return install


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
    result_of_tool = second.messages[-1]
    assert ("tool", "Ab3dEf6hi") == (result_of_tool["role"], result_of_tool["tool_call_id"])
    assert 3.0 == float(result_of_tool["content"])
    echoed = [each for message in second.messages for each in message.get("tool_calls", ())]
    assert ["Ab3dEf6hi"] == [each["id"] for each in echoed]
    assert json.loads(ARGUMENTS) == json.loads(echoed[0]["function"]["arguments"])
    assert any("Let me add." in message["content"] for message in second.messages)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "dialect"), RUNS)
@pytest.mark.parametrize("kind", ["session_closed", "context_length_exceeded"])
def test_refusal_ends_the_client(gateway, refused, run, name, dialect, stream, kind):
    """A refused client makes one call, and ends with an error."""
    gateway.backend.script = lambda _call: refused(kind, "It is over.", num_tokens=5000, max_tokens=4096)

    result = run(gateway, name, dialect, stream)

    assert ["error"] == list(result)
    assert 1 == len(gateway.backend.calls)


@pytest.mark.parametrize(("name", "dialect"), RUNS)
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
