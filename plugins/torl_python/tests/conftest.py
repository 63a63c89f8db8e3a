"""What the tests of the agent share: a model that writes given turns, and a tool that stands for a sandbox."""

import asyncio

import pytest
from attrs import define, field

from turnwise import Resources, ToolResult
from turnwise.errors import InfrastructureError
from turnwise.function_tool import function_tool
from turnwise.testing.agent_probe import AgentProbe, make_task, probe_chat
from turnwise.testing.scripted import ScriptedEngine
from turnwise_torl_python import make_torl_python
from turnwise_torl_python.config import TorlPythonConfig


@define
class Script:
    """A model that writes given turns; where the engine stopped it in one, it goes on with it."""

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
    Answers as a sandbox does.

    Args:
        code: A sum, or a word for what shall happen.
    """
    code = code.strip()
    if code == "crash":
        text = "printed before\nTraceback (most recent call last):\n  File x\nValueError: crash"
        return ToolResult(text=text, error=True)
    if code == "silent":
        return ToolResult(text="")
    if code == "down":
        raise InfrastructureError("no sandbox")
    if code.startswith("repeat"):
        return ToolResult(text="ab" * int(code.split()[1]))
    return ToolResult(text=f"{sum(map(int, code.split('+')))}\n")


def resources_with(python=fake_python, chat=None):
    """Return a chat template over bytes, unless another is given, and the tool `python`."""
    return Resources(chat=chat or probe_chat(), tools={"python": function_tool(python, name="python")})


def play(turns, resources, *, limits=None, task=None, engine=None, agent=None, **options):
    """Run one episode whose model writes turns of these ids."""
    agent = agent or make_torl_python(TorlPythonConfig(**options), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=("",))

    async def run():
        scripted = ScriptedEngine(engine or Script(turns))
        await scripted.start()
        return await probe.run(task or make_task(), engine=scripted, limits=probe.limits(**(limits or {})))

    return run()


def converse_in_bytes(*texts, python=fake_python, **options):
    """Run one episode whose model writes these turns; the last one ends with the end-of-turn token."""
    resources = resources_with(python)
    turns = [resources.chat.tokenizer.encode(text) for text in texts]
    turns[-1].append(resources.chat.stop_token_ids[0])
    return asyncio.run(play(turns, resources, **options))


@pytest.fixture(scope="session")
def converse():
    """Runs one episode: texts of turns, and limits, a task, a tool or options of the agent as keywords."""
    return converse_in_bytes


@pytest.fixture(scope="session")
def played():
    """Awaits one episode: ids of turns and resources, and the same keywords."""
    return play


@pytest.fixture(scope="session")
def make_resources():
    """Makes resources of a tool and a chat template."""
    return resources_with


@pytest.fixture(scope="session")
def make_script():
    """Makes a model that writes turns of given ids."""
    return Script
