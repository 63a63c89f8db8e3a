"""The adapter and the tools that it makes pass the conformance suites."""

from __future__ import annotations

import pytest

from turnwise_plain_functions import reward, tool
from turnwise_testing import AdapterSuite
from turnwise_testing.checks.adapter import AdapterExample
from turnwise_testing.checks.check import run_check
from turnwise_testing.checks.tool import TOOL_CHECKS, ToolExample, ToolProbe


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def finish(episode, resources, *, words: int = 1):
    """Finish at once."""


def score(episode, *, factor: float = 1.0) -> float:
    """Score."""
    return factor


def reply(messages) -> str:
    """Reply."""
    return "yes"


def no_fields(batch) -> dict[str, object]:
    """Add nothing."""
    return {}


class TestFunctions(AdapterSuite):
    """The adapter `functions`."""

    entry_point = "plain_functions"
    module = "turnwise_plain_functions"
    registered = "functions"

    @pytest.fixture
    def examples(self):
        """Functions, decorated and not."""
        return (
            AdapterExample(kind="tools", value=add, options={"run_in": "process"}),
            AdapterExample(kind="tools", value=tool(add, name="plus")),
            AdapterExample(kind="agents", value=finish, options={"words": 2}),
            AdapterExample(kind="rewards", value=score, options={"factor": 2.0}),
            AdapterExample(kind="rewards", value=reward(score)),
            AdapterExample(kind="interactions", value=reply),
            AdapterExample(kind="postprocessors", value=no_fields),
        )


@pytest.mark.parametrize("run_in", ["thread", "process", "loop"])
@pytest.mark.parametrize("check", TOOL_CHECKS)
def test_a_function_is_a_tool(check, run_in):
    """A tool of a function passes each check of tools, wherever it runs."""
    examples = (ToolExample(arguments={"a": 2, "b": 3}, text="5"),)
    run_check(TOOL_CHECKS[check], ToolProbe(make_tool=lambda: tool(add, run_in=run_in), examples=examples))
