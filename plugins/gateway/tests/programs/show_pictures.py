"""
An agent of a user: shows the model a cat, and a dog as the result of its tool, through the libraries of the vendors.

The first argument is the dialect. Each file of the folder in `HOSTILE`, if there is one, is shown before, and what the
server answers goes to the file in `ANSWERS`. With `SERVER`, pictures are named by URLs, which end in their hashes.
"""

import base64
import hashlib
import json
import os
import sys
from pathlib import Path

MODEL, DIALECT = os.environ["TURNWISE_MODEL"], sys.argv[1]
CAT, DOG = Path(os.environ["CAT"]).read_bytes(), Path(os.environ["DOG"]).read_bytes()
HOSTILE = sorted(Path(os.environ["HOSTILE"]).iterdir()) if "HOSTILE" in os.environ else []
SCHEMA = {"type": "object", "properties": {}}
answers = {}


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    if "SERVER" in os.environ:
        return f"{os.environ['SERVER']}/{hashlib.sha256(data).hexdigest()}"
    return f"data:image/png;base64,{encode(data)}"


def show_hostile(show, error_class):
    """Show each hostile file by a function of its bytes."""
    for file in HOSTILE:
        try:
            show(file.read_bytes())
        except error_class as error:
            answers[file.name] = [error.status_code, error.message]
        else:
            answers[file.name] = [200, ""]


def run_chat(client, error_class):
    tools = [{"type": "function", "function": {"name": "camera", "parameters": SCHEMA}}]

    def picture(data):
        return {"type": "image_url", "image_url": {"url": url_of(data)}}

    def create(messages):
        return client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message

    def ask(data):
        return [{"role": "user", "content": [{"type": "text", "text": "Which animal?"}, picture(data)]}]

    show_hostile(lambda data: create(ask(data)), error_class)
    messages = ask(CAT)
    message = create(messages)
    (call,) = message.tool_calls
    content = [{"type": "text", "text": "Seen:"}, picture(DOG)]
    create([*messages, message, {"role": "tool", "tool_call_id": call.id, "content": content}])


def run_responses(client, error_class):
    tools = [{"type": "function", "name": "camera", "parameters": SCHEMA}]

    def picture(data):
        return {"type": "input_image", "detail": "auto", "image_url": url_of(data)}

    def create(items):
        return client.responses.create(model=MODEL, input=items, tools=tools).output

    def ask(data):
        return [{"role": "user", "content": [{"type": "input_text", "text": "Which animal?"}, picture(data)]}]

    show_hostile(lambda data: create(ask(data)), error_class)
    items = ask(CAT)
    output = create(items)
    (call,) = (each for each in output if each.type == "function_call")
    result = [{"type": "input_text", "text": "Seen:"}, picture(DOG)]
    create([*items, *output, {"type": "function_call_output", "call_id": call.call_id, "output": result}])


def run_messages(client, error_class):
    tools = [{"name": "camera", "input_schema": SCHEMA}]

    def picture(data):
        if "SERVER" in os.environ:
            return {"type": "image", "source": {"type": "url", "url": url_of(data)}}
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encode(data)}}

    def create(messages):
        with client.messages.stream(model=MODEL, messages=messages, tools=tools, max_tokens=100) as stream:
            return stream.get_final_message()

    def ask(data):
        return [{"role": "user", "content": [{"type": "text", "text": "Which animal?"}, picture(data)]}]

    show_hostile(lambda data: create(ask(data)), error_class)
    messages = ask(CAT)
    message = create(messages)
    (call,) = (each for each in message.content if each.type == "tool_use")
    content = [{"type": "text", "text": "Seen:"}, picture(DOG)]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
    create([*messages, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}])


if DIALECT == "messages":
    import anthropic

    run_messages(anthropic.Anthropic(), anthropic.APIStatusError)
else:
    import openai

    (run_chat if DIALECT == "chat" else run_responses)(openai.OpenAI(), openai.APIStatusError)
if "ANSWERS" in os.environ:
    Path(os.environ["ANSWERS"]).write_text(json.dumps(answers))
print("TURNWISE_SCORE=1")
