"""An agent of a user: calls the model through the `openai` client, with the tool `add`, until it answers."""

import json
import os

from openai import OpenAI

tools = json.loads(os.environ["TOOLS"])
task = json.loads(os.environ["TURNWISE_TASK"])
client, messages = OpenAI(), task["messages"]
while True:
    reply = client.chat.completions.create(model=os.environ["TURNWISE_MODEL"], messages=messages, tools=tools)
    message = reply.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = str(arguments["a"] + arguments["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print("TURNWISE_SCORE=0.25")
