"""Conversations of `tool_agent` with a scripted model, tools and a simulated user."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from attrs import define, evolve, field

from turnwise import Reply
from turnwise_plain_functions import tool
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources
from turnwise_tool_agent import make_tool_agent
from turnwise_tool_agent.config import ToolAgentConfig


def call(name="add", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: First.
        b: Second.
    """
    return a + b


@define
class User:
    """A simulated user with scripted replies."""

    replies: list[Reply]
    seen: list[int] = field(factory=list)

    async def create(self, task):
        return None

    async def respond(self, session, messages):
        self.seen.append(len(messages))
        return self.replies.pop(0)

    async def release(self, session): ...


def converse(*texts, tools=(add,), user=None, limits: Mapping = {}, task=None, closed=True, **options):
    """Run one episode whose model writes one text per turn; `closed` says whether the first ends with its end token."""
    resources = evolve(
        probe_resources(),
        tools={func.__name__: tool(func) for func in tools},
        interaction=user,
    )
    agent = make_tool_agent(ToolAgentConfig(**options), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=texts)
    first, *others = probe.turn_ids
    remaining = iter([first if closed else first[:-1], *others])

    async def run():
        engine = ScriptedEngine(lambda _request: next(remaining))
        await engine.start()
        return await probe.run(task or make_task(), engine=engine, limits=probe.limits(**limits))

    return asyncio.run(run())


def tool_texts(run):
    return [message["content"] for message in run.result.messages if message["role"] == "tool"]
