"""An agent of a user: asks for structured output through the clients of OpenAI and Anthropic, and checks each reply."""

import json
import os
from typing import Literal

import openai
from anthropic import Anthropic
from pydantic import BaseModel, ConfigDict, Field


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["red", "green"]
    sold: bool
    count: int = Field(ge=0, le=9)


class Other(BaseModel):
    text: str


model = os.environ["TURNWISE_MODEL"]
messages = json.loads(os.environ["TURNWISE_TASK"])["messages"]
client, anthropic = openai.OpenAI(max_retries=0), Anthropic(max_retries=0)
item_tool = openai.pydantic_function_tool(Item)
tools = [item_tool, openai.pydantic_function_tool(Other)]
found = []

# Chat Completions
chat = client.chat.completions
found.append(chat.parse(model=model, messages=messages, response_format=Item).choices[0].message.parsed)
named = {"type": "function", "function": {"name": "Item"}}
reply = chat.parse(model=model, messages=messages, tools=tools, tool_choice=named)
(call,) = reply.choices[0].message.tool_calls
found.append(call.function.parsed_arguments)
allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
reply = chat.parse(model=model, messages=messages, tools=tools, tool_choice=allowed, parallel_tool_calls=False)
(call,) = reply.choices[0].message.tool_calls
found.append(call.function.parsed_arguments)

# A turn without a form is free.
chat.create(model=model, messages=messages, max_tokens=5)

# Responses
found.append(client.responses.parse(model=model, input=messages, text_format=Item).output_parsed)
function = {"type": "function", "name": "Item", "parameters": Item.model_json_schema()}
reply = client.responses.create(
    model=model, input=messages, tools=[function], tool_choice="required", parallel_tool_calls=False
)
(call,) = [each for each in reply.output if each.type == "function_call"]
found.append(Item.model_validate_json(call.arguments))

# Messages
form = {"format": {"type": "json_schema", "schema": Item.model_json_schema()}}
reply = anthropic.messages.create(model=model, max_tokens=3000, messages=messages, extra_body={"output_config": form})
(text,) = [block.text for block in reply.content if block.type == "text"]
found.append(Item.model_validate_json(text))
tool = {"name": "Item", "input_schema": Item.model_json_schema()}
one = {"type": "tool", "name": "Item", "disable_parallel_tool_use": True}
reply = anthropic.messages.create(model=model, max_tokens=3000, messages=messages, tools=[tool], tool_choice=one)
(call,) = [block for block in reply.content if block.type == "tool_use"]
found.append(Item.model_validate(call.input))

assert all(isinstance(each, Item) for each in found), found

# A schema that cannot be served is refused by the name of its field.
schema = {"name": "set", "schema": {"type": "array", "uniqueItems": True}}
try:
    chat.create(model=model, messages=messages, response_format={"type": "json_schema", "json_schema": schema})
    refusal = None
except openai.BadRequestError as error:
    refusal = error
assert refusal is not None, "the schema was served"
assert (refusal.param, "uniqueItems" in refusal.message) == ("response_format", True), refusal
print(f"TURNWISE_SCORE={len(found)}")
