"""The hooks, and the tool and reward behind them as turnwise calls them."""

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
    """One call of the registered tool, its session begun and ended."""

    async def run() -> ToolResult:
        tool = make_calculator(config or CalculatorConfig(), Resources())
        session = await tool.create(TASK)
        try:
            return await tool.execute(session, {"expression": expression})
        finally:
            assert await tool.release(session) is None

    return asyncio.run(run())


def score(*messages: Message) -> float:
    """What the registered reward gives an episode that ended with these messages."""
    episode = cast(Episode, SimpleNamespace(task=TASK, messages=list(messages)))
    given = make_exact_match(None, Resources()).score(episode)
    assert isinstance(given, TrajectoryScore)
    return given.value


def test_the_hooks_register_both() -> None:
    """One tool and one reward, under their names."""
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
    """A host that only lists plugins loads no model library."""
    code = (
        "import sys, turnwise_calculator_demo; print(sorted({'torch', 'transformers', 'tokenizers'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tool_computes() -> None:
    """The registered tool gives what the plain function gives."""
    assert ToolResult(text="71") == call("23 + 48")
    assert calculator("23 + 48") == call("23 + 48").text


def test_a_refused_call_reads_as_in_training() -> None:
    """The message that the model sees is the one it was trained on."""
    with pytest.raises(ToolError) as caught:
        call("(1 + 2) * 3")
    assert respond("(1 + 2) * 3") == str(caught.value) == "Error: only one operation per call"


def test_the_limit_of_operations_is_an_option() -> None:
    """Without a limit one call takes a whole expression; a limit below one is refused."""
    assert call("(1 + 2) * 3", CalculatorConfig(max_operations=None)).text == "9"
    with pytest.raises(ValueError, match="max_operations"):
        CalculatorConfig(max_operations=0)


def test_the_schema_describes_the_function() -> None:
    """The registered schema is the one that a typed function gives."""
    function_tool = pytest.importorskip("turnwise.function_tool").function_tool
    made: dict[str, Any] = dict(function_tool(calculator).schema)
    assert made == TOOL_SCHEMA


def test_the_reward_reads_the_last_answer() -> None:
    """Only an assistant message without calls, at the end, is an answer."""
    answer = {"role": "assistant", "content": "The answer is 71."}
    calling = {"role": "assistant", "content": "It is 71.", "tool_calls": [{"function": {"name": "calculator"}}]}
    assert score({"role": "tool", "content": "5"}, answer) == 1.0
    assert score({"role": "assistant", "content": "The answer is 72."}) == 0.0
    assert score(answer, {"role": "tool", "content": "71"}) == 0.0
    assert score(answer, calling) == 0.0
    assert score({"role": "assistant", "content": None}) == 0.0
