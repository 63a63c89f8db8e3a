"""Prompts with pictures: they are context of each request, and outputs of programs follow as in a text."""

import asyncio

import pytest
from attrs import evolve

from turnwise import Status, ToolResult
from turnwise.media import picture_part
from turnwise.protocols import ModelSpec
from turnwise_chat_templates import load_chat
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs.vision import make_picture, save_qwen
from turnwise_testing.probes.agent import AgentProbe, make_task
from turnwise_torl_python import make_torl_python
from turnwise_torl_python.config import TorlPythonConfig

CAT = make_picture(20, 30, "red")
ASKED = {"role": "user", "content": [{"type": "text", "text": "What is it? "}, picture_part(CAT)]}
TURNS = ("```python\n1 + 1\n```\n```output", "It is 2.")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """The chat of a small Qwen3-VL."""
    return load_chat(ModelSpec(path=save_qwen(tmp_path_factory.mktemp("model"))))


def play(chat, make_resources, make_script, requests=None, **options):
    """Run one episode on an engine that takes pictures."""
    resources = make_resources(chat=chat, **({"python": options.pop("python")} if "python" in options else {}))
    agent = make_torl_python(TorlPythonConfig(**options), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=("",))
    turns = [chat.tokenizer.encode(text) for text in TURNS]
    turns[-1].append(chat.stop_token_ids[0])
    script = make_script(turns)

    def sample(request):
        if requests is not None:
            requests.append(request)
        return script(request)

    async def run():
        engine = ScriptedEngine(sample)
        engine.capabilities = evolve(engine.capabilities, pictures=True)
        await engine.start()
        return await probe.run(make_task(messages=(ASKED,)), engine=engine, limits=probe.limits())

    return asyncio.run(run()).result


def test_a_prompt_with_a_picture(chat, make_resources, make_script):
    """Each request has it in its place, and the record is the prompt, the turns and the output between them."""
    requests = []
    result = play(chat, make_resources, make_script, requests, template="chat", system_prompt="")
    assert result.status is Status.COMPLETED, result.fault
    (record,) = result.trajectories
    prompt = chat.picture_prompt([ASKED])
    places = [(place.start, place.num_tokens, place.picture.key) for place in prompt.pictures]
    assert [(place.start, place.num_tokens, place.picture.key) for place in record.pictures] == places
    assert record.input_ids[: len(prompt)].tolist() == prompt.token_ids.tolist()
    assert chat.tokenizer.decode(record.response_ids[:-1]) == f"{TURNS[0]}\n2\n```\n{TURNS[1]}"
    assert len(requests) > 1
    assert all([(p.start, p.num_tokens, p.picture.key) for p in request.pictures] == places for request in requests)


def test_the_plain_prompt_refuses_a_picture(chat, make_resources, make_script):
    """Its line names the option that helps."""
    result = play(chat, make_resources, make_script)
    assert result.fault.owner == "data"
    assert "the user message has other parts; set agent.template: chat" in result.fault.message


def test_an_output_refuses_a_picture(chat, make_resources, make_script):
    """An output is text in a fence."""

    def python(code: str) -> ToolResult:
        """
        Draw.

        Args:
            code: of a program.
        """
        return ToolResult(text="", pictures=(CAT,))

    result = play(chat, make_resources, make_script, template="chat", python=python)
    assert result.status is Status.FAILED
    assert "a tool returned 1 pictures, and agent 'torl_python' shows the model none" in result.fault.message
