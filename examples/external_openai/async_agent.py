"""The agent of `agent.py` as an async function, so that hundreds of them run in one process."""

import json

from openai import AsyncOpenAI

from turnwise import Task
from turnwise_calculator_demo.calculator import calculator
from turnwise_gateway.host import ModelClient

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


async def solve(task: Task, client: ModelClient) -> None:
    """Solve one task; the reward of the run scores the last message."""
    messages = list(task.messages)
    async with AsyncOpenAI(base_url=client.openai_base_url, api_key=client.api_key) as api:
        for _ in range(4):
            reply = await api.chat.completions.create(model=client.model, messages=messages, tools=[TOOL])
            messages.append(reply.choices[0].message)
            calls = reply.choices[0].message.tool_calls or []
            if not calls:
                return
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)})
