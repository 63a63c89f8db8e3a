"""The hooks, and the tool and reward that they register."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

import turnwise_calculator_demo
from turnwise import Episode, Message, Registry, Resources, Reward, Task, Tool, ToolResult, TrajectoryScore
from turnwise.errors import ToolError
from turnwise_calculator_demo import make_calculator, make_exact_match
from turnwise_calculator_demo.calculator import calculator
from turnwise_calculator_demo.config import CalculatorConfig
from turnwise_calculator_demo.episodes import TOOL_SCHEMA, respond

TASK = Task(messages=({"role": "user", "content": "What is 23 + 48?"},), uid="task", ground_truth="71")


def call(expression: str, config: CalculatorConfig | None = None) -> ToolResult:
    """Call the registered tool in a session."""

    async def run() -> ToolResult:
        tool = make_calculator(config or CalculatorConfig(), Resources())
        session = await tool.create(TASK)
        try:
            return await tool.execute(session, {"expression": expression})
        finally:
            assert await tool.release(session) is None

    return asyncio.run(run())


def score(*messages: Message) -> float:
    """Return the registered reward's score of an episode that ends with these messages."""
    episode = cast(Episode, SimpleNamespace(task=TASK, messages=list(messages)))
    given = make_exact_match(None, Resources()).score(episode)
    assert isinstance(given, TrajectoryScore)
    return given.value


def test_the_hooks_register_both() -> None:
    """The hooks register one tool and one reward by name."""
    tools: Registry[Tool] = Registry("tool")
    rewards: Registry[Reward] = Registry("reward")
    turnwise_calculator_demo.register_tools(tools)
    turnwise_calculator_demo.register_rewards(rewards)
    assert tools.names() == ("calculator",)
    assert rewards.names() == ("exact_match",)
    tool = tools.get("calculator").factory(CalculatorConfig(), Resources())
    reward = rewards.get("exact_match").factory(rewards.get("exact_match").config(), Resources())
    assert isinstance(tool, Tool)
    assert isinstance(reward, Reward)


def test_importing_the_plugin_is_light() -> None:
    """Importing the plugin loads no model library."""
    code = (
        "import sys, turnwise_calculator_demo; print(sorted({'torch', 'transformers', 'tokenizers'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tool_computes() -> None:
    """The registered tool returns the same result as the function."""
    assert ToolResult(text="71") == call("23 + 48")
    assert calculator("23 + 48") == call("23 + 48").text


def test_a_rejected_call_reads_as_in_training() -> None:
    """The error message equals the one in the training data."""
    with pytest.raises(ToolError) as caught:
        call("(1 + 2) * 3")
    assert respond("(1 + 2) * 3") == str(caught.value) == "Error: only one operation per call"


def test_the_limit_of_operations_is_an_option() -> None:
    """Without a limit a call computes a whole expression; a limit below 1 is rejected."""
    assert call("(1 + 2) * 3", CalculatorConfig(max_operations=None)).text == "9"
    with pytest.raises(ValueError, match="max_operations"):
        CalculatorConfig(max_operations=0)


def test_the_schema_describes_the_function() -> None:
    """The registered schema equals the schema of the typed function."""
    tool = pytest.importorskip("turnwise_plain_functions").tool
    made: dict[str, Any] = dict(tool(calculator).schema)
    assert made == TOOL_SCHEMA


def test_the_reward_reads_the_last_answer() -> None:
    """Only a final assistant message without calls is an answer."""
    answer = {"role": "assistant", "content": "The answer is 71."}
    calling = {"role": "assistant", "content": "It is 71.", "tool_calls": [{"function": {"name": "calculator"}}]}
    assert score({"role": "tool", "content": "5"}, answer) == 1.0
    assert score({"role": "assistant", "content": "The answer is 72."}) == 0.0
    assert score(answer, {"role": "tool", "content": "71"}) == 0.0
    assert score(answer, calling) == 0.0
    assert score({"role": "assistant", "content": None}) == 0.0
