"""An agent of AG2: arguments and output as of the other clients."""

import asyncio
import json
import sys

from ag2 import Agent, tool
from ag2.config import AnthropicConfig, OpenAIConfig, OpenAIResponsesConfig


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, dialect, stream):
    given = {"model": "tiny", "api_key": key, "streaming": stream == "stream"}
    config = {
        "chat": lambda: OpenAIConfig(base_url=f"{url}/v1", **given),
        "responses": lambda: OpenAIResponsesConfig(base_url=f"{url}/v1", **given),
        "messages": lambda: AnthropicConfig(base_url=url, **given),
    }[dialect]()
    agent = Agent("adder", prompt="You add.", config=config, tools=[add])
    return (await agent.ask("Add 1 and 2.")).body


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
