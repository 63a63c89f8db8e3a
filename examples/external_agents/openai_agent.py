"""The calculator agent with the `openai` client and two tools, over Chat Completions."""

import asyncio
import json
import os
from typing import Any

from calculator import calculator, negate
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

HTTP = DefaultAsyncHttpxClient()  # shared: a client of HTTP takes longer to make than a call
FUNCTIONS = {"calculator": (calculator, "expression"), "negate": (negate, "number")}


def describe(name: str) -> Any:
    """Return the schema of a tool."""
    function, argument = FUNCTIONS[name]
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": function.__doc__, "parameters": parameters}}


def run(call: Any) -> Any:
    """Return the result of a call as a message, or the reason why there is none."""
    try:
        function, argument = FUNCTIONS[call.function.name]
        text = function(json.loads(call.function.arguments)[argument])
    except (KeyError, TypeError, ValueError) as error:
        text = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": text}


async def solve(messages: list[Any], model: str, base_url: str | None = None, api_key: str | None = None) -> None:
    """Solve a task; without URL and key the client reads OPENAI_BASE_URL and OPENAI_API_KEY."""
    client, tools = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP), list(map(describe, FUNCTIONS))
    for _ in range(4):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=tools)
        message = reply.choices[0].message
        if not message.tool_calls:
            return
        messages = [*messages, message, *map(run, message.tool_calls)]


if __name__ == "__main__":
    asyncio.run(solve(json.loads(os.environ["TURNWISE_TASK"])["messages"], os.environ["TURNWISE_MODEL"]))
