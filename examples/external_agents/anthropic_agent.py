"""The calculator agent with the client of Anthropic, over Messages."""

import asyncio
import json
import os
from typing import Any

from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from calculator import calculator

HTTP = DefaultAsyncHttpxClient()  # shared: a client of HTTP takes longer to make than a call
TOOL = {
    "name": "calculator",
    "description": calculator.__doc__,
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


async def solve(messages: list[Any], model: str, base_url: str | None = None, api_key: str | None = None) -> None:
    """Solve a task; without URL and key the client reads ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN."""
    client = AsyncAnthropic(base_url=base_url, api_key=api_key, http_client=HTTP)
    for _ in range(4):
        reply = await client.messages.create(model=model, max_tokens=1024, messages=messages, tools=[TOOL])
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return
        outputs = {call.id: calculator(str(call.input.get("expression"))) for call in calls}
        results = [{"type": "tool_result", "tool_use_id": key, "content": text} for key, text in outputs.items()]
        turns = [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        messages = [*messages, *turns]


if __name__ == "__main__":
    asyncio.run(solve(json.loads(os.environ["TURNWISE_TASK"])["messages"], os.environ["TURNWISE_MODEL"]))
