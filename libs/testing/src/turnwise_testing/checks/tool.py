"""
Requirements of every tool, as plain functions without pytest.

A check takes a `ToolProbe` and raises `AssertionError` with a text that describes the failure. Calls go through the
core's `ToolBox`, as a model's calls do.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from attrs import field, frozen

from turnwise.protocols import Tool
from turnwise.tools.schema import compile_schema
from turnwise.tools.toolbox import ToolBox, tools_by_name
from turnwise.types import Task, ToolCall
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.agent import make_task
from turnwise_testing.probes.engine import expect, expect_equal


@frozen(kw_only=True)
class ToolExample:
    """
    A call of a tool.

    Attributes:
        arguments: that fit the schema.
        text: of the result; None when the example does not say.
        error: whether the result is an error for the model.
        tool: name of the called tool; empty for the only one.
    """

    arguments: Mapping[str, Any] = field(factory=dict)
    text: str | None = None
    error: bool = False
    tool: str = ""


Call = Callable[[ToolExample], Coroutine[Any, Any, None]]
"""Runs an example, and compares the result with the expected one."""


@frozen(kw_only=True)
class ToolProbe:
    """
    The probe of a tool.

    Attributes:
        make_tool: builds the tool, or the set of tools, as the registered factory does.
        examples: calls, each in a separate session.
        task: of the episode.
    """

    make_tool: Callable[[], Tool | tuple[Tool, ...]]
    examples: tuple[ToolExample, ...] = ()
    task: Task = field(factory=make_task)

    def tools(self) -> tuple[Tool, ...]:
        """Return a new tool, or each of a new set."""
        made = self.make_tool()
        return made if isinstance(made, tuple) else (made,)

    @asynccontextmanager
    async def session(self, tools: tuple[Tool, ...]) -> AsyncIterator[Call]:
        """Open the sessions of an episode, and return a function that runs examples; a failing release is an error."""
        session = ToolBox(tools_by_name(tools)).open_session(self.task, {})

        async def call(example: ToolExample) -> None:
            name = example.tool or tools[0].schema["function"]["name"]
            result = await session.call(ToolCall(name=name, arguments=example.arguments))
            where = f"{name}({json.dumps(dict(example.arguments))})"
            expect(result.error == example.error, f"{where}: expected error={example.error}, got {result!r}")
            if example.text is not None:
                expect_equal(result.text, example.text, f"text of {where}")

        try:
            yield call
        finally:
            await session.release()
        for name, error in session.release_failures.items():
            raise AssertionError(f"release of {name!r} raised {error!r}") from error


TOOL_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
TOOLS = PartChecks(
    checks=TOOL_CHECKS,
    probe=lambda part: ToolProbe(make_tool=part.make, examples=part.examples),
    examples="ToolExamples",
)
_check = register(TOOL_CHECKS)
_NO_EXAMPLES = "no calls are known: a ToolSuite has them in its fixture `examples`"


@_check
def check_fulfils_the_protocol(probe: ToolProbe) -> None:
    """The factory returns a tool, or a tuple of tools, with async methods."""
    for tool in probe.tools():
        missing = [name for name in ("schema", "create", "execute", "release") if not hasattr(tool, name)]
        expect(not missing, f"{type(tool).__name__} has no {', '.join(missing)}")


@_check
def check_schema_is_valid(probe: ToolProbe) -> None:
    """The schema is an OpenAI function schema of JSON values, and the same for every object."""
    first, second = probe.tools(), probe.tools()
    for tool in first:
        compile_schema(tool.schema)
        expect_equal(json.loads(json.dumps(tool.schema)), tool.schema, "the schema after a round trip through JSON")
    expect_equal([tool.schema for tool in second], [tool.schema for tool in first], "the schemas of a second object")


@_check
async def check_session_without_a_call_closes(probe: ToolProbe) -> None:
    """A session that served no call can be released, and gives a number or None."""
    for tool in probe.tools():
        reward = await tool.release(await tool.create(probe.task))
        expect(reward is None or isinstance(reward, int | float), f"release returned {reward!r}")


@_check
async def check_examples_have_their_results(probe: ToolProbe) -> str | None:
    """Every example gives a `ToolResult` with the expected text, or the expected error."""
    for example in probe.examples:
        async with probe.session(probe.tools()) as call:
            await call(example)
    return None if probe.examples else _NO_EXAMPLES


@_check
async def check_arguments_stay_unchanged(probe: ToolProbe) -> str | None:
    """A call does not change its arguments, which the record of the episode shows."""
    for example in probe.examples:
        before = copy.deepcopy(dict(example.arguments))
        async with probe.session(probe.tools()) as call:
            await call(example)
        expect_equal(example.arguments, before, "the arguments after the call")
    return None if probe.examples else _NO_EXAMPLES


@_check
async def check_sessions_do_not_mix(probe: ToolProbe) -> str | None:
    """One object serves many episodes at once, each as it does alone."""
    tools = probe.tools()

    async def episode(example: ToolExample) -> None:
        async with probe.session(tools) as call:
            await call(example)

    async with asyncio.TaskGroup() as group:
        for example in probe.examples * 4:
            group.create_task(episode(example))
    return None if probe.examples else _NO_EXAMPLES


@_check
async def check_cancelled_call_leaves_a_session_to_release(probe: ToolProbe) -> str | None:
    """A call that a deadline cancels ends, and its session can be released."""
    for example in probe.examples:
        async with probe.session(probe.tools()) as call, asyncio.TaskGroup() as group:
            running = group.create_task(call(example))
            await asyncio.sleep(0)
            running.cancel()
    return None if probe.examples else _NO_EXAMPLES
