"""
The text of an episode: what the assistant writes, how a call is read and what comes back.

One place for the formats that the demonstrations teach and the evaluator plays.
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
"""The tool as chat templates and OpenAI-style interfaces take it."""

_CALL: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def call_text(expression: str) -> str:
    """An assistant turn that calls the calculator, in Hermes format."""
    call = {"name": TOOL_NAME, "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def answer_text(answer: int) -> str:
    """The assistant turn that ends an episode."""
    return f"The answer is {answer}."


def parse_call(text: str) -> str | None:
    """
    The expression of the first call in an assistant turn.

    Args:
        text: The turn as text, its tool-call tags included.

    Returns:
        The expression, or None where there is no well-formed call of the calculator.
    """
    match = _CALL.search(text)
    if match is None:
        return None
    try:
        call = json.loads(match[1])
        expression = call["arguments"]["expression"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    is_ours = call.get("name") == TOOL_NAME and isinstance(expression, str)
    return expression if is_ours else None


def respond(expression: str) -> str:
    """What the tool message says: the result, or `Error: ...` with the reason."""
    try:
        return calculator(expression)
    except ValueError as error:
        return f"Error: {error}"
