"""Episodes of tasks of the leaderboard: which turns score 1, and what refuses to score."""

import asyncio

import pytest
from attrs import evolve
from bfcl_inputs import tasks_of, written

from turnwise import Status
from turnwise_bfcl.reward import BfclReward
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources
from turnwise_tool_agent import make_tool_agent
from turnwise_tool_agent.config import ToolAgentConfig

TEA = ("kitchen.brew", {"drink": "tea", "litres": 1.0})
COFFEE = ("kitchen.brew", {"drink": "coffee", "litres": 1.0})
MALFORMED = '<tool_call>{"name": "kitchen.brew"</tool_call>'
NO_OBJECT = '<tool_call>{"name": "kitchen.brew", "arguments": 3}</tool_call>'


def score(task, text, resources=None, **options):
    """Return the result of an episode whose model writes one turn."""
    resources = resources or probe_resources()
    agent = make_tool_agent(ToolAgentConfig(**options), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=(text,))

    async def run():
        engine = ScriptedEngine(lambda _request: probe.turn_ids[0])
        await engine.start()
        limits = probe.limits(prompt_length=8192)
        return await probe.run(task, engine=engine, limits=limits, reward=BfclReward(resources.chat))

    return asyncio.run(run()).result


@pytest.mark.parametrize(
    ("category", "text", "expected"),
    [
        ("parallel", written(TEA, COFFEE), 1.0),
        ("parallel", f"Both: {written(COFFEE, TEA)} now.", 1.0),
        ("parallel", written(TEA), 0.0),
        ("parallel", written(TEA, COFFEE) + MALFORMED, 0.0),
        ("parallel", "kitchen.brew(drink='tea')", 0.0),
        ("irrelevance", "No function helps.", 1.0),
        ("irrelevance", written(TEA), 0.0),
        ("irrelevance", MALFORMED, 1.0),
        ("irrelevance", NO_OBJECT, 1.0),
        ("live_irrelevance", "Hello!", 1.0),
        ("live_relevance", written(("unknown", {})), 1.0),
        ("live_relevance", "No.", 0.0),
        ("live_relevance", MALFORMED, 0.0),
    ],
)
def test_scores(category, text, expected):
    """A malformed call is none, which makes other calls wrong."""
    (task,) = tasks_of(category)
    result = score(task, text)
    assert result.status is Status.COMPLETED, result.fault
    assert result.reward == expected


def test_only_the_first_turn_counts():
    """Turns in the prompt of the task are not the model's."""
    (task,) = tasks_of("irrelevance")
    call = {"id": "a", "type": "function", "function": {"name": "kitchen.brew", "arguments": "{}"}}
    turns = ({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "No, wait."})
    assert score(evolve(task, messages=(*task.messages, *turns)), "I wait.").reward == 1.0


@pytest.mark.parametrize(
    ("task", "options", "error"),
    [
        (make_task(), {}, "is of no category of BFCL; set data.path to bfcl:CATEGORY"),
        (
            None,
            {"tools_in_prompt": True},
            "its prompt does not show the function 'kitchen.brew'; use agent: tool_agent",
        ),
    ],
)
def test_episodes_that_cannot_be_judged_fail(task, options, error):
    """A model that saw no function would score on irrelevant questions."""
    result = score(task or tasks_of("irrelevance")[0], "No.", **options)
    assert result.status is Status.FAILED
    assert error in result.fault.message
