"""An agent of Google's ADK over LiteLLM: arguments and output as of the other clients."""

import asyncio
import json
import sys

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main(url, key, _dialect, stream):
    model = LiteLlm(model="openai/tiny", api_base=f"{url}/v1", api_key=key)
    agent = LlmAgent(name="adder", model=model, instruction="You add.", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="u")
    question = types.Content(role="user", parts=[types.Part(text="Add 1 and 2.")])
    config = RunConfig(streaming_mode=StreamingMode.SSE if stream == "stream" else StreamingMode.NONE)
    answer = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=question, run_config=config):
        if event.is_final_response() and event.content and event.content.parts:
            answer = event.content.parts[-1].text
    return answer


print(json.dumps({"answer": asyncio.run(main(*sys.argv[1:]))}))
