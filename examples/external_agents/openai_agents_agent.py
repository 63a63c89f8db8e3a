"""The calculator agent with the OpenAI Agents SDK, over Responses."""

import asyncio
import json
import os
from contextlib import suppress
from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from calculator import calculator
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

set_tracing_disabled(True)
HTTP = DefaultAsyncHttpxClient()  # shared: a client of HTTP takes longer to make than a call
TOOL = function_tool(calculator)


async def solve(messages: list[Any], model: str, base_url: str | None = None, api_key: str | None = None) -> None:
    """Solve a task; without URL and key the client reads OPENAI_BASE_URL and OPENAI_API_KEY."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    agent = Agent(name="Calculator", tools=[TOOL], model=OpenAIResponsesModel(model=model, openai_client=client))
    with suppress(MaxTurnsExceeded, ModelBehaviorError):  # the second one: a tool that does not exist
        await Runner.run(agent, messages, max_turns=4)


if __name__ == "__main__":
    asyncio.run(solve(json.loads(os.environ["TURNWISE_TASK"])["messages"], os.environ["TURNWISE_MODEL"]))
