"""
Text formats of an episode: tool calls, answers and tool responses.

The demonstrations and the evaluator both use these formats.
"""

import json
import re
from typing import Any, Final

from turnwise_calculator_demo.calculator import calculator

TOOL_NAME: Final = "calculator"
"""The tool's name in calls and schemas."""

TOOL_SCHEMA: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": 'Computes one arithmetic operation, for example "23 + 48".',
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Two numbers and one of + - * / // % ** between them.",
                }
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}
"""The tool's schema in OpenAI's format."""

_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def call_text(expression: str) -> str:
    """Return an assistant turn that calls the calculator, in Hermes format."""
    call = {"name": TOOL_NAME, "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def answer_text(answer: int) -> str:
    """Return the assistant turn that ends an episode."""
    return f"The answer is {answer}."


def parse_call(text: str) -> str | None:
    """Return the expression of the first call in an assistant turn; None without a well-formed calculator call."""
    match = _CALL.search(text)
    if match is None:
        return None
    try:
        call = json.loads(match[1])
        expression = call["arguments"]["expression"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    is_calculator_call = call.get("name") == TOOL_NAME and isinstance(expression, str)
    return expression if is_calculator_call else None


def respond(expression: str) -> str:
    """Return the tool message for an expression: the result, or `Error: ...` with the reason."""
    try:
        return calculator(expression)
    except ValueError as error:
        return f"Error: {error}"
