"""An agent of Semantic Kernel: arguments and output as of the other clients."""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Sums:
    @kernel_function(name="add", description="Add two numbers.")
    def add(self, a: float, b: float) -> float:
        return a + b


async def main(url, key, _dialect, stream):
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    service = OpenAIChatCompletion(ai_model_id="tiny", async_client=client)
    agent = ChatCompletionAgent(service=service, name="adder", instructions="You add.", plugins=[Sums()])
    if stream != "stream":
        return str((await agent.get_response("Add 1 and 2.")).message)
    parts = [str(part.message) async for part in agent.invoke_stream("Add 1 and 2.")]
    return "".join(parts).strip().removeprefix("Let me add.").strip()


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
