"""Sessions with the chat template of a model and the parser of its format: clients see no tags, and forks show none."""

import asyncio
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve
from session_scenarios import ADD, ScenarioAgent, as_message, make_call, results_of, user

from turnwise import Registry, Resources, Status
from turnwise.errors import ConfigError, TemplateError
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.agents.agent import build_parts
from turnwise_gateway.config import ExternalConfig
from turnwise_hermes_parser import register_tool_parsers as register_hermes
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.agent import AddTool, AgentProbe, make_task
from turnwise_tool_parsers import register_tool_parsers

_SPEC = importlib.util.find_spec("trl")
FOLDER = Path(_SPEC.origin).parent / "chat_templates" if _SPEC and _SPEC.origin else Path("missing")
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if "training" not in path.stem)
SPECIAL = re.compile(
    r"<\|[A-Za-z_]+\|?>|<[a-z_]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_[a-z]+>|\[gMASK\]|<sop>"
)
CALL = {"id": "abcdefgh0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}

pytestmark = pytest.mark.skipif(not NAMES, reason="trl is not installed")


@cache
def chat_of(name):
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    specials = sorted(set(SPECIAL.findall(source)))
    return ChatTemplate(byte_tokenizer(source, specials, bos_token="<bos>", eos_token="<eos>"), name=name)


def resources_of(chat, parser):
    registry = Registry("tool parser")
    register_hermes(registry)
    register_tool_parsers(registry)
    entry = registry.get(parser)
    resources = Resources(chat=chat, tools={"add": AddTool()})
    return evolve(resources, parser=entry.factory(entry.config(), resources))


def run(resources, turns, scenario):
    """Run a scenario in a session of the gateway's own parts, whose model writes the turns in order."""
    chat = resources.chat
    parts = build_parts(ExternalConfig(function="x:y"), resources)
    agent = ScenarioAgent(scenario, parts)
    left = iter([[*chat.tokenizer.encode(turn), chat.stop_token_ids[0]] for turn in turns])
    probe = AgentProbe(make_agent=lambda: None, resources=resources, turns=turns, response_length=1 << 15)

    async def episode():
        engine = ScriptedEngine(lambda _request: next(left))
        await engine.start()
        return await probe.run(make_task(), agent=agent, engine=engine)

    done = asyncio.run(episode())
    if agent.error is not None:
        raise agent.error
    return done.result


def turn_with_a_call(chat):
    """Return the text of a turn with a call, as the template writes it."""
    messages = [user("Add.")]
    prompt = chat.tokenizer.decode(chat.prompt(messages, [ADD]))
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "name": "add", "content": "RESULT"}
    whole = chat.tokenizer.decode(chat.prompt([*messages, turn, result], [ADD]))
    if not whole.startswith(prompt):
        pytest.skip("the template changes earlier prompts")
    ends = [whole.find(chat.tokenizer.decode([each]), len(prompt)) for each in chat.stop_token_ids]
    return whole[len(prompt) : min(end for end in ends if end >= 0)]


@pytest.mark.many_cases
@pytest.mark.parametrize("name", NAMES)
def test_a_client_sees_the_call_and_no_tags(name):
    """The template writes a call, the model samples it, and the client gets its name, arguments and nothing else."""
    try:
        chat = chat_of(name)
        resources = resources_of(chat, "auto")
        turn = turn_with_a_call(chat)
        chat.delta([{"role": "tool", "tool_call_id": CALL["id"], "name": "add", "content": ""}], chat.stop_token_ids[0])
    except (TemplateError, ConfigError) as error:
        pytest.skip(f"no calls in a conversation: {str(error)[:60]}")
    replies = []

    async def scenario(session):
        messages = [user("Add.")]
        for _ in range(2):
            answer = await session.answer(make_call(*messages))
            answer.confirm()
            replies.append(answer.reply)
            messages += [as_message(answer.reply), *results_of(answer.reply, "3")]

    done = run(resources, (turn, "It is 3."), scenario)

    assert done.status is Status.COMPLETED
    assert len(done.trajectories) == 1
    first, second = replies
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("add", '{"a": 1, "b": 2}')]
    assert SPECIAL.search(first.content) is None
    assert second.content.strip() == "It is 3."


ANSWER = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 3."
GPT_OSS_CALL = (
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)


@pytest.mark.parametrize("parser", ["gpt_oss", "auto"])
@pytest.mark.parametrize("tools", [(), (ADD,)], ids=["no tools", "tools"])
def test_gpt_oss(parser, tools):
    """Content and reasoning come apart without a reasoning parser in the config, and a fork spells no tags."""
    chat = chat_of("gptoss")
    replies = []

    async def scenario(session):
        messages = [user("Add.")]
        answer = await session.answer(make_call(*messages, tools=tools))
        answer.confirm()
        replies.append(answer.reply)
        changed = [user("Add them."), as_message(answer.reply), user("Sure?")]
        (await session.answer(make_call(*changed, tools=tools))).confirm()

    done = run(resources_of(chat, parser), (ANSWER, ANSWER), scenario)

    assert [(reply.content, reply.reasoning) for reply in replies] == [("It is 3.", "Easy.")]
    fork = done.trajectories[1].input_ids.tolist()
    text = chat.tokenizer.decode(fork)
    for token in ("<|channel|>", "<|message|>", "<|start|>"):
        assert fork.count(chat.tokenizer.encode(token)[0]) == text.count(token)
    assert "<|channel|>final<|message|>It is 3." in text


def test_gpt_oss_calls_in_a_fork():
    """The history of a fork has the reasoning and the call as they were sampled."""
    chat = chat_of("gptoss")

    async def scenario(session):
        answer = await session.answer(make_call(user("Add.")))
        answer.confirm()
        assert (answer.reply.content, answer.reply.reasoning) == ("", "I add.")
        messages = [user("Add them."), as_message(answer.reply), *results_of(answer.reply, "3")]
        (await session.answer(make_call(*messages))).confirm()

    done = run(resources_of(chat, "gpt_oss"), (GPT_OSS_CALL, ANSWER), scenario)

    text = chat.tokenizer.decode(done.trajectories[1].input_ids)
    assert "<|channel|>analysis<|message|>I add.<|end|>" in text
    assert "to=functions.add" in text
