"""An agent of Haystack: arguments and output as of the other clients."""

import asyncio
import json
import sys
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool
def add(a: Annotated[float, "First."], b: Annotated[float, "Second."]) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, _dialect, stream):
    callback = (lambda _chunk: None) if stream == "stream" else None
    generator = OpenAIChatGenerator(
        model="tiny", api_base_url=f"{url}/v1", api_key=Secret.from_token(key), streaming_callback=callback
    )
    agent = Agent(chat_generator=generator, tools=[add], system_prompt="You add.")
    return agent.run(messages=[ChatMessage.from_user("Add 1 and 2.")])["last_message"].text


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
