"""Fixtures of the agent's tests: a model with scripted turns, and a fake of the sandbox tool."""

import asyncio

import pytest
from attrs import define, field

from turnwise import Resources, ToolResult
from turnwise.errors import InfrastructureError
from turnwise_plain_functions import tool
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_chat
from turnwise_torl_python import make_torl_python
from turnwise_torl_python.config import TorlPythonConfig


@define
class Script:
    """A model with scripted turns, which continues a turn in which the engine stopped it."""

    turns: list[list[int]]
    start: int = -1
    current: list[int] = field(factory=list)
    num_requests: int = 0

    def __call__(self, request):
        self.num_requests += 1
        context = request.token_ids.tolist()
        new = context[self.start :] if self.start >= 0 else []
        if self.start < 0 or new != self.current[: len(new)] or len(new) >= len(self.current):
            self.current = self.turns.pop(0)
        else:
            self.current = self.current[len(new) :]
        self.start = len(context)
        return self.current


def fake_python(code: str) -> ToolResult:
    """
    Imitates a sandbox.

    Args:
        code: A sum, or a word that selects an outcome.
    """
    code = code.strip()
    if code == "crash":
        text = "printed before\nTraceback (most recent call last):\n  File x\nValueError: crash"
        return ToolResult(text=text, error=True)
    if code == "submit":
        return ToolResult(text="submitted", ends_episode=True)
    if code == "silent":
        return ToolResult(text="")
    if code == "down":
        raise InfrastructureError("no sandbox")
    if code.startswith("repeat"):
        return ToolResult(text="ab" * int(code.split()[1]))
    return ToolResult(text=f"{sum(map(int, code.split('+')))}\n")


def resources_with(python=fake_python, chat=None):
    """Return resources with the tool `python` and a chat template, over bytes by default."""
    return Resources(chat=chat or probe_chat(), tools={"python": tool(python, name="python")})


def play(turns, resources, *, limits=None, task=None, engine=None, agent=None, **options):
    """Run one episode whose model writes turns of the given ids."""
    agent = agent or make_torl_python(TorlPythonConfig(**options), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=("",))

    async def run():
        scripted = ScriptedEngine(engine or Script(turns))
        await scripted.start()
        return await probe.run(task or make_task(), engine=scripted, limits=probe.limits(**(limits or {})))

    return run()


def converse_in_bytes(*texts, python=fake_python, **options):
    """Run one episode whose model writes the given turns; the last one ends with the end-of-turn token."""
    resources = resources_with(python)
    turns = [resources.chat.tokenizer.encode(text) for text in texts]
    turns[-1].append(resources.chat.stop_token_ids[0])
    return asyncio.run(play(turns, resources, **options))


@pytest.fixture(scope="session")
def converse():
    """A function that runs an episode with texts of turns; limits, task, tool and agent options are keywords."""
    return converse_in_bytes


@pytest.fixture(scope="session")
def played():
    """A coroutine function that runs an episode with ids of turns and resources, and the same keywords."""
    return play


@pytest.fixture(scope="session")
def make_resources():
    """A function that makes resources with a tool and a chat template."""
    return resources_with


@pytest.fixture(scope="session")
def make_script():
    """A function that makes a model with turns of given ids."""
    return Script
