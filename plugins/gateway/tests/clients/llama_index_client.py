"""An agent workflow of LlamaIndex: arguments and output as of the other clients."""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, _dialect, stream):
    model = OpenAILike(
        model="tiny", api_base=f"{url}/v1", api_key=key, is_chat_model=True, is_function_calling_model=True
    )
    agent = FunctionAgent(
        name="adder",
        description="Adds.",
        system_prompt="You add.",
        tools=[add],
        llm=model,
        streaming=stream == "stream",
    )
    workflow = AgentWorkflow(agents=[agent], root_agent="adder")
    return str(await workflow.run(user_msg="Add 1 and 2."))


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
