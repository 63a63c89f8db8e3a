"""An agent of Strands, which always streams: arguments and output as of the other clients."""

import asyncio
import json
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, _dialect, _stream):
    model = OpenAIModel(client_args={"base_url": f"{url}/v1", "api_key": key}, model_id="tiny")
    agent = Agent(model=model, tools=[add], system_prompt="You add.", callback_handler=None)
    return str(await agent.invoke_async("Add 1 and 2.")).strip()


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
