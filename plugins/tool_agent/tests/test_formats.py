"""Runs with the parsers of formats: ids of calls over their results, and reasoning apart from the content."""

import asyncio
import importlib.util
import re
from pathlib import Path

import pytest
from attrs import evolve
from conversations import add

from turnwise import Registry, Resources
from turnwise_chat_templates.template import ChatTemplate
from turnwise_plain_functions import tool
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs import templates
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources
from turnwise_tool_agent import make_tool_agent
from turnwise_tool_agent.config import ToolAgentConfig
from turnwise_tool_parsers import register_tool_parsers


def kimi(call_id, body='{"a": 1, "b": 2}'):
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{body}<|tool_call_end|>"


def mistral(*ids):
    """Return a turn with calls; None is a call without an id."""
    calls = [
        '{"name": "add", "arguments": {"a": 1, "b": 2}' + (f', "id": "{each}"' if each else "") + "}" for each in ids
    ]
    return f"[TOOL_CALLS] [{', '.join(calls)}]"


def converse(chat, parser, *texts, **options):
    """Run an episode; return the text of its record, and its messages."""
    registry = Registry("tool parser")
    register_tool_parsers(registry)
    entry = registry.get(parser)
    resources = evolve(
        probe_resources(),
        chat=chat,
        tools={"add": tool(add)},
        parser=entry.factory(entry.config(), Resources(chat=chat)),
    )
    agent = make_tool_agent(ToolAgentConfig(max_parallel_calls=4, **options), resources)
    turns = [[*chat.tokenizer.encode(text), chat.stop_token_ids[0]] for text in texts]

    async def run():
        remaining = iter(turns)
        engine = ScriptedEngine(lambda _request: next(remaining))
        await engine.start()
        probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=texts, response_length=1 << 14)
        return await probe.run(make_task(), engine=engine)

    result = asyncio.run(run()).result
    return chat.tokenizer.decode(result.trajectories[0].input_ids), result


def results_of(text, before, after):
    """Return the ids over the results in a record."""
    return [part.partition(after)[0] for part in text.split(before)[1:]]


@pytest.mark.parametrize("parser", ["kimi_k2", "auto"])
@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([kimi("functions.add:0")], ["functions.add:0"]),
        ([kimi("functions.add:0") + kimi("functions.add:1")], ["functions.add:0", "functions.add:1"]),
        ([kimi("functions.add:0"), kimi("functions.add:0")], ["functions.add:0", "functions.add:0"]),
        ([kimi("add"), kimi("functions.add:7")], ["add", "functions.add:7"]),
        ([kimi("functions.add:2", "{"), kimi("functions.nothing:3")], ["functions.add:2", "functions.nothing:3"]),
        ([kimi("functions.add:0"), kimi("")], ["functions.add:0", "functions.malformed_call:1"]),
    ],
    ids=["one", "parallel", "again", "bare", "malformed", "none"],
)
def test_kimi(parser, turns, expected):
    """A malformed call that has no id gets one in Kimi's form."""
    text, result = converse(templates.kimi_chat(), parser, *turns, "Done.")

    assert results_of(text, "## Return of ", "\n") == expected
    listed = [call["id"] for message in result.messages for call in message.get("tool_calls", ())]
    assert listed == expected
    assert [message["tool_call_id"] for message in result.messages if message["role"] == "tool"] == expected


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([mistral("VvvODy9mT")], ["VvvODy9mT"]),
        ([mistral("VvvODy9mT", "aaaaaaaa1"), mistral("VvvODy9mT")], ["VvvODy9mT", "aaaaaaaa1", "VvvODy9mT"]),
        ([mistral(None), mistral("call00200"), mistral(None)], ["call00100", "call00200", "call00300"]),
        ([mistral("short", "VvvODy9mT")], ["call00100", "VvvODy9mT"]),
    ],
    ids=["one", "parallel", "none", "refused"],
)
def test_mistral(turns, expected):
    """An id that the template refuses would end the episode, so the call gets another one."""
    text, _result = converse(templates.mistral_chat(), "mistral", *turns, "Done.")

    assert results_of(text, '"call_id": "', '"') == expected


def test_a_new_id_is_none_that_the_model_wrote():
    """The model may write the id that the second turn would get."""
    text, _result = converse(templates.mistral_chat(), "mistral", mistral("call00200"), mistral(None), "Done.")

    first, second = results_of(text, '"call_id": "', '"')
    assert first == "call00200" != second
    assert len(second) == 9


_SPEC = importlib.util.find_spec("trl")
GPT_OSS = Path(_SPEC.origin).parent / "chat_templates/gptoss.jinja" if _SPEC and _SPEC.origin else Path("missing")
GPT_OSS_CALL = (
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)
GPT_OSS_ANSWER = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 3."


@pytest.mark.skipif(not GPT_OSS.is_file(), reason="trl is not installed")
@pytest.mark.parametrize("parser", ["gpt_oss", "auto"])
def test_gpt_oss(parser):
    """No tag is in the content of the last message, nor in that of the turn with the call; the reasoning is apart."""
    source = GPT_OSS.read_text(encoding="utf-8")
    chat = ChatTemplate(byte_tokenizer(source, sorted(set(re.findall(r"<\|[a-z_]+\|>", source)))))

    _text, result = converse(chat, parser, GPT_OSS_CALL, GPT_OSS_ANSWER)

    _user, call, tool_result, answer = result.messages
    assert (call["content"], call["reasoning_content"], tool_result["content"]) == ("", "I add.", "3")
    assert answer == {"role": "assistant", "content": "It is 3.", "reasoning_content": "Easy."}
