"""An agent of the OpenAI Agents SDK: arguments and output as of the other clients."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, dialect, stream):
    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatCompletionsModel
    model = kind(model="tiny", openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=key))
    agent = Agent(name="Adder", instructions="You add.", tools=[add], model=model)
    if stream != "stream":
        return (await Runner.run(agent, "Add 1 and 2.")).final_output
    running = Runner.run_streamed(agent, "Add 1 and 2.")
    async for _ in running.stream_events():
        pass
    return running.final_output


try:
    print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
except Exception as error:  # noqa: BLE001  # the test reads any error from the output
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
