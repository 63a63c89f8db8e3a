"""The calculator agent with pydantic-ai, over Chat Completions."""

import asyncio
import json
import os
from contextlib import suppress
from typing import Any

from calculator import calculator
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

HTTP = DefaultAsyncHttpxClient()  # shared: a client of HTTP takes longer to make than a call


async def solve(messages: list[Any], model: str, base_url: str | None = None, api_key: str | None = None) -> None:
    """Solve a task; without URL and key the client reads OPENAI_BASE_URL and OPENAI_API_KEY."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    agent = Agent(OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)), tools=[calculator], retries=4)
    with suppress(UsageLimitExceeded, UnexpectedModelBehavior):  # the second one: no retry is left
        await agent.run(messages[0]["content"], usage_limits=UsageLimits(request_limit=4))


if __name__ == "__main__":
    asyncio.run(solve(json.loads(os.environ["TURNWISE_TASK"])["messages"], os.environ["TURNWISE_MODEL"]))
