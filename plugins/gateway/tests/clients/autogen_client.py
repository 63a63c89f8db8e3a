"""An agent of AutoGen: arguments and output as of the other clients."""

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, _dialect, stream):
    info = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}
    info["structured_output"] = False
    client = OpenAIChatCompletionClient(model="tiny", base_url=f"{url}/v1", api_key=key, model_info=info)
    agent = AssistantAgent(
        "adder",
        client,
        tools=[add],
        system_message="You add.",
        model_client_stream=stream == "stream",
        max_tool_iterations=5,
    )
    return (await agent.run(task="Add 1 and 2.")).messages[-1].content


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
