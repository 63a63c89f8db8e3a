"""An agent on LiteLLM: `python litellm_client.py URL KEY chat STREAM` prints its answer or its error as JSON."""

import json
import sys

import litellm

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}


def main(url, key, dialect, stream):
    assert dialect == "chat"
    messages = [{"role": "user", "content": "Add 1 and 2."}]
    while True:
        reply = litellm.completion(
            model="openai/tiny",
            api_base=f"{url}/v1",
            api_key=key,
            messages=messages,
            tools=[TOOL],
            stream=stream == "stream",
        )
        if stream == "stream":
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])})


try:
    print(json.dumps({"answer": str(main(*sys.argv[1:]))}))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
