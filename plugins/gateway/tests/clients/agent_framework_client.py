"""An agent of Microsoft's Agent Framework: arguments and output as of the other clients."""

import asyncio
import json
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, dialect, stream):
    kind = OpenAIChatClient if dialect == "responses" else OpenAIChatCompletionClient
    agent = Agent(client=kind(model="tiny", base_url=f"{url}/v1", api_key=key), instructions="You add.", tools=[add])
    if stream != "stream":
        answer = (await agent.run("Add 1 and 2.")).text
    else:
        updates = agent.run("Add 1 and 2.", stream=True)
        async for _ in updates:
            pass
        answer = (await updates.get_final_response()).text
    # The text of all turns, and not of the last one alone.
    return answer.strip().removeprefix("Let me add.").strip()


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
