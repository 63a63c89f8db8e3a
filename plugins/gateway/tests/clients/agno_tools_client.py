"""An agent of Agno: arguments and output as of the other clients."""

import asyncio
import json
import sys

from agno.agent import Agent
from agno.models.openai.like import OpenAILike


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, _dialect, stream):
    model = OpenAILike(id="tiny", base_url=f"{url}/v1", api_key=key)
    agent = Agent(model=model, tools=[add], instructions="You add.", telemetry=False)
    if stream != "stream":
        answer = (await agent.arun("Add 1 and 2.")).content
    else:
        events = agent.arun("Add 1 and 2.", stream=True)
        answer = "".join([event.content async for event in events if getattr(event, "content", None)])
    # The text of all turns, and not of the last one alone.
    return answer.strip().removeprefix("Let me add.").strip()


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
