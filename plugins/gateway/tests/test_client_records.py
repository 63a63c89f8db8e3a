"""Unmodified clients over real sessions: their conversation is one record, which trains what they were sent."""

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from session_scenarios import Sessions, serve_program

from turnwise import Status
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine

CLIENTS = Path(__file__).parent / "clients"
DIALECTS = {
    "ag2": ("chat", "responses", "messages"),
    "agent_framework": ("chat", "responses"),
    "agno": ("chat",),
    "ai_sdk": ("chat", "responses"),
    "autogen": ("chat",),
    "camel": ("chat",),
    "claude_agent": ("messages",),
    "crewai": ("chat",),
    "google_adk": ("chat",),
    "haystack": ("chat",),
    "langchain": ("chat", "responses"),
    "langgraph": ("chat", "responses"),
    "litellm": ("chat",),
    "llama_index": ("chat",),
    "mastra": ("chat",),
    "openai_agents": ("chat", "responses"),
    "openai_agents_js": ("chat", "responses"),
    "openai_js": ("chat", "responses"),
    "openhands": ("chat", "messages"),
    "pydantic_ai": ("chat", "messages", "responses"),
    "qwen_agent": ("chat",),
    "semantic_kernel": ("chat",),
    "strands": ("chat",),
}
TOOL_NAMES = {"claude_agent": "mcp__sums__add", "semantic_kernel": "Sums-add"}
"""Of clients that name a tool in their own way."""
SCRIPTS = {"agno": "agno_tools", "strands": "strands_tools"}
"""Of clients with more than one script."""
CALL = '{"name": "NAME", "arguments": {"b":  2.0, "a": 1}}'
TURNS = (
    f"<think>\nA sum.\n</think>\nLet me add.\n<tool_call>\n{CALL}\n</tool_call>",
    "The sum is 3.",
)

pytestmark = pytest.mark.slow


def command_of(folder, name):
    """Return the command of a client that is installed in a folder."""
    if (folder / "bin/python").is_file():
        return [str(folder / "bin/python"), str(CLIENTS / f"{SCRIPTS.get(name, name)}_client.py")]
    return ["node", str(CLIENTS / f"{name}_client.mjs")]


@pytest.mark.parametrize("stream", ["plain", "stream"])
@pytest.mark.parametrize(("name", "dialect"), [(name, each) for name, all_ in DIALECTS.items() for each in all_])
def test_a_conversation_is_one_record(installed, name, dialect, stream):
    """Two turns, the first with reasoning, text and a call in odd spelling: one record with each sampled token."""
    folder, output = installed(name), []

    def make_engine(probe):
        encode, stop = probe.chat.tokenizer.encode, probe.chat.stop_token_ids[0]
        tool = TOOL_NAMES.get(name, "add")

        def choose(request):
            text = bytes(int(token_id) for token_id in request.token_ids if token_id < 256).decode(errors="replace")
            return [*encode(TURNS["Let me add." in text].replace("NAME", tool)), stop]

        return ScriptedEngine(choose, capabilities=evolve(SCRIPTED_CAPABILITIES, stop_strings=True))

    async def scenario(session):
        output.append(await serve_program(session, *command_of(folder, name), ways=(dialect, stream), cwd=folder))

    done = Sessions().run(scenario, engine=make_engine)

    assert {"answer": "The sum is 3."} == json.loads(output[0])
    assert Status.COMPLETED is done.result.status
    (record,) = done.records
    turns = [record.input_ids[start:end].tolist() for start, end in record.turns()]
    assert [each.token_ids.tolist() for each in done.run.answers] == turns
    assert 2 == len(turns)
    assert int(np.sum(record.response_mask)) == sum(map(len, turns))
