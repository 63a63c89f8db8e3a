"""The tool and the reward behind turnwise's interfaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise import Episode, Task, ToolResult, TrajectoryScore
from turnwise.errors import ToolError
from turnwise_calculator_demo.calculator import evaluate_expression, format_number
from turnwise_calculator_demo.config import CalculatorConfig
from turnwise_calculator_demo.episodes import TOOL_SCHEMA
from turnwise_calculator_demo.rewards import exact_match


class CalculatorTool:
    """
    The tool `calculator`: computes arithmetic without a session.

    Args:
        config: limit of operations per call.
    """

    def __init__(self, config: CalculatorConfig) -> None:
        self._max_operations = config.max_operations

    @property
    def schema(self) -> Mapping[str, Any]:
        """The OpenAI function schema, with one parameter `expression`."""
        return TOOL_SCHEMA

    async def create(self, task: Task) -> None:
        """Do nothing: calls are independent."""

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        """Compute `arguments["expression"]`; raise `ToolError` with the reason if it is invalid or has no value."""
        try:
            value = evaluate_expression(arguments["expression"], max_operations=self._max_operations)
        except ValueError as error:
            raise ToolError(f"Error: {error}") from error
        return ToolResult(text=format_number(value))

    async def release(self, session: object) -> None:
        """Do nothing: there is no session."""


class ExactMatch:
    """The reward `exact_match`: 1.0 if the last assistant message gives the ground truth, otherwise 0.0."""

    def score(self, episode: Episode) -> TrajectoryScore:
        """
        Score a finished episode.

        An episode that reached a limit ends with a tool call or a tool message; it has no answer and scores 0.0.

        Raises:
            ValueError: the task's ground truth is not a whole number.
        """
        last = episode.messages[-1]
        is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
        text = str(last.get("content") or "") if is_answer else ""
        return TrajectoryScore(value=exact_match(text, str(episode.task.ground_truth)))
