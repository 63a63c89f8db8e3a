"""An agent as you may have one already: it solves a task with a calculator, and knows nothing of turnwise."""

import json
import os

from openai import OpenAI

from turnwise_calculator_demo.calculator import calculator

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


client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY lead it to the model that is trained
messages = json.loads(os.environ["TURNWISE_TASK"])["messages"]
for _ in range(6):
    reply = client.chat.completions.create(model=os.environ["TURNWISE_MODEL"], messages=messages, tools=[TOOL])
    messages.append(reply.choices[0].message)
    calls = reply.choices[0].message.tool_calls or []
    if not calls:
        break
    for call in calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)})
