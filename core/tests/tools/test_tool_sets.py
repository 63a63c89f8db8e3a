"""Tools with one session key share a session, and one registered name may be several tools."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import define, field

from turnwise import NoConfig, Resources, Task, Tool, ToolCall, ToolResult
from turnwise.config.own_code import OwnCode
from turnwise.config.parts import Choice, ToolChoice
from turnwise.errors import ConfigError
from turnwise.plugin.host import Host
from turnwise.runtime.tools import build_tools
from turnwise.tools.toolbox import DescribedTool, ToolBox

TASK = Task(messages=[{"role": "user", "content": "go"}], uid="task")


@define(eq=False)
class Counting:
    """A tool that counts the calls of its session."""

    name: str
    session_key: object
    log: list[str] = field(factory=list)

    @property
    def schema(self) -> dict[str, Any]:
        """No parameters."""
        return {"type": "function", "function": {"name": self.name, "parameters": {"type": "object"}}}

    async def create(self, _task: Task) -> list[str]:
        self.log.append(f"create {self.name}")
        return []

    async def execute(self, session: list[str], _arguments: Mapping[str, Any]) -> ToolResult:
        session.append(self.name)
        return ToolResult(text=" ".join(session))

    async def release(self, _session: list[str]) -> float:
        self.log.append(f"release {self.name}")
        return 0.5


def run_all(box: ToolBox, *names: str) -> tuple[list[str], float]:
    async def run() -> tuple[list[str], float]:
        async with box.session(TASK) as session, asyncio.TaskGroup() as group:
            calls = [group.create_task(session.call(ToolCall(name=name, arguments={}))) for name in names]
        return [call.result().text for call in calls], session.released_reward

    return asyncio.run(run())


def test_tools_with_one_key_share_a_session() -> None:
    """The session opens once, ends once and gives one reward, whichever tool is called first."""
    log: list[str] = []
    key = object()
    tools = [Counting("a", key, log), Counting("b", key, log), Counting("c", None, log)]

    texts, reward = run_all(ToolBox(tools), "b", "a", "c", "b")

    assert texts == ["b", "b a", "c", "b a b"]
    assert sorted(log) == ["create a", "create c", "release a", "release c"]
    assert reward == 1.0


def test_another_schema_keeps_the_shared_session() -> None:
    """`DescribedTool` passes the key on."""
    log: list[str] = []
    first, second = Counting("a", "key", log), Counting("b", "key", log)
    renamed = DescribedTool(second, {"type": "function", "function": {"name": "z", "parameters": {"type": "object"}}})

    texts, _ = run_all(ToolBox([first, renamed]), "a", "z")

    assert texts == ["a", "a b"]


@pytest.fixture
def host() -> Host:
    """A host whose tool `pair` is two tools."""
    host = Host()

    def make(_config: NoConfig, _resources: Resources) -> tuple[Tool, ...]:
        return Counting("a", "key"), Counting("b", "key")

    host.registry("tools").add("pair", make)
    return host


def test_a_registered_tool_may_be_several(host: Host) -> None:
    """They have their own names; one schema cannot replace theirs."""
    assert list(build_tools([Choice("pair")], host, Resources(), OwnCode())) == ["a", "b"]
    with pytest.raises(ConfigError, match="a set of 2 tools, which 'schema' cannot replace"):
        build_tools([ToolChoice("pair", {}, {"type": "function"})], host, Resources(), OwnCode())
    with pytest.raises(ConfigError, match="two tools are named 'a'"):
        build_tools([Choice("pair"), Choice("pair")], host, Resources(), OwnCode())
