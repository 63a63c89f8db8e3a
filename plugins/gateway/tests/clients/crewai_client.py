"""A crew of one agent of CrewAI: arguments and output as of the other clients."""

import asyncio
import json
import os
import sys

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, _dialect, stream):
    model = LLM(model="openai/tiny", base_url=f"{url}/v1", api_key=key, stream=stream == "stream")
    agent = Agent(role="Adder", goal="You add.", backstory="You can add.", tools=[add], llm=model, verbose=False)
    task = Task(description="Add 1 and 2.", expected_output="The sum.", agent=agent)
    return (await Crew(agents=[agent], tasks=[task], verbose=False).kickoff_async()).raw


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
