"""The calculator agent with the `openai` client and two tools, over Chat Completions."""

import asyncio
import json
import os
from typing import Any

from calculator import calculator, negate
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

HTTP = DefaultAsyncHttpxClient()  # shared: a client of HTTP takes longer to make than a call
FUNCTIONS = {"calculator": (calculator, "expression"), "negate": (negate, "number")}
TOOLS: list[Any] = []
for name, (function, argument) in FUNCTIONS.items():
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    schema = {"name": name, "description": function.__doc__, "parameters": parameters}
    TOOLS.append({"type": "function", "function": schema})


def run(call: Any) -> Any:
    """Return the result of a call as a message, or the reason why there is none."""
    try:
        text = FUNCTIONS[call.function.name][0](**json.loads(call.function.arguments))
    except (KeyError, TypeError, ValueError) as error:
        text = f"Error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": text}


async def solve(messages: list[Any], model: str, base_url: str | None = None, api_key: str | None = None) -> None:
    """Solve a task; without URL and key the client reads OPENAI_BASE_URL and OPENAI_API_KEY."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    for _ in range(4):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        if not (calls := reply.choices[0].message.tool_calls):
            return
        messages = [*messages, reply.choices[0].message, *map(run, calls)]


if __name__ == "__main__":
    asyncio.run(solve(json.loads(os.environ["TURNWISE_TASK"])["messages"], os.environ["TURNWISE_MODEL"]))
