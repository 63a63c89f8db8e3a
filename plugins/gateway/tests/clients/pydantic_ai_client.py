"""An agent of pydantic-ai: arguments and output as of the other clients."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def read_all(_context, events):
    async for _ in events:
        pass


async def main(url, key, dialect, stream):
    if dialect == "messages":
        model = AnthropicModel("tiny", provider=AnthropicProvider(base_url=url, api_key=key))
    else:
        kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatModel
        model = kind("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    agent = Agent(model, instructions="You add.")

    @agent.tool_plain
    def add(a: float, b: float) -> float:
        """Add two numbers."""
        return a + b

    if stream != "stream":
        return (await agent.run("Add 1 and 2.")).output
    # Not `run_stream`, which takes a text before a call for the answer.
    return (await agent.run("Add 1 and 2.", event_stream_handler=read_all)).output


try:
    print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
