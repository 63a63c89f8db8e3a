"""An agent as you may have one already: it solves a task with a calculator, and knows nothing of turnwise."""

import asyncio
import json
import os
import ssl
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from turnwise_calculator_demo.calculator import calculator

CERTIFICATES = ssl.create_default_context()  # reading them for each client takes longer than a call
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes one arithmetic operation.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def run(arguments: str) -> str:
    """Return the result of a call, or the reason why there is none."""
    try:
        return calculator(json.loads(arguments)["expression"])
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {error}"


async def solve(messages: list[Any], model: str, base_url: str | None = None, api_key: str | None = None) -> None:
    """Solve a task; without URL and key the client reads OPENAI_BASE_URL and OPENAI_API_KEY."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        for _ in range(4):
            reply = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            calls = message.tool_calls or []
            if not calls:
                return
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)} for call in calls
            ]
            messages = [*messages, message, *results]


if __name__ == "__main__":
    asyncio.run(solve(json.loads(os.environ["TURNWISE_TASK"])["messages"], os.environ["TURNWISE_MODEL"]))
