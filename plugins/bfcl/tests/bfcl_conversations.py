"""Conversations of the multi-turn categories: a scripted model, the tools, the user and the reward of a run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache

from bfcl_inputs import written

from turnwise import NoConfig, Resources
from turnwise_bfcl import make_reward, make_tools
from turnwise_bfcl.multi_turn import read_functions
from turnwise_bfcl.source import BfclSource
from turnwise_simulated_users import make_scripted_user
from turnwise_simulated_users.config import ScriptedUserConfig
from turnwise_task_files.rows import task_from_row
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AgentProbe, ProbeParser, probe_chat
from turnwise_tool_agent import make_tool_agent
from turnwise_tool_agent.config import ToolAgentConfig


@cache
def tasks(category: str):
    """Return all tasks of a category."""
    return [task_from_row(row, row_number=number) for number, row in enumerate(BfclSource().rows(category))]


@cache
def resources() -> Resources:
    """Return the parts of a run that converses."""
    tools = {tool.schema["function"]["name"]: tool for tool in make_tools(NoConfig(), Resources())}
    user = make_scripted_user(ScriptedUserConfig(), Resources())
    return Resources(chat=probe_chat(), parser=ProbeParser(probe_chat()), tools=tools, interaction=user)


@cache
def _parameters() -> dict[str, list[str]]:
    functions = [each for group in read_functions(None).values() for each in group]
    return {each["name"]: list(each["parameters"]["properties"]) for each in functions}


def to_call(text: str) -> tuple[str, dict]:
    """Return a call of a ground truth as its name and arguments."""
    call = ast.parse(text.strip(), mode="eval").body
    placed = dict(zip(_parameters()[call.func.id], call.args, strict=False))
    named = {each.arg: each.value for each in call.keywords}
    return call.func.id, {name: ast.literal_eval(value) for name, value in (placed | named).items()}


def right_turns(task, *, at_once: bool = True) -> list[str]:
    """Return the turns of a model that makes the right calls, all of a question at once or one after the other."""
    turns = []
    for calls in task.ground_truth:
        steps = [calls] if at_once else [[call] for call in calls]
        turns += [written(*map(to_call, step)) for step in steps if step]
        turns.append("Done.")
    return turns


async def converse(task, turns: Sequence[str], parts: Resources | None = None, **options):
    """Return an episode whose model says the turns, and then nothing but "Done."."""
    parts = parts or resources()
    options = {"max_parallel_calls": 64, "max_tool_response_length": 4096, **options}
    agent = make_tool_agent(ToolAgentConfig(**options), parts)
    probe = AgentProbe(make_agent=lambda: agent, resources=parts, turns=(*turns, "Done."))
    left = iter(probe.turn_ids)
    engine = ScriptedEngine(lambda _request: next(left, probe.turn_ids[-1]))
    await engine.start()
    limits = probe.limits(prompt_length=1 << 18, response_length=1 << 20)
    return await probe.run(task, engine=engine, limits=limits, reward=make_reward(NoConfig(), parts))
