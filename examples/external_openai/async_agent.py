"""The agent of `agent.py` for the worker's process, in which hundreds of them run at once."""

import agent

from turnwise import Task
from turnwise_gateway.host import ModelClient


async def solve(task: Task, client: ModelClient) -> None:
    """Solve one task; the reward of the run scores the last message."""
    await agent.solve(list(task.messages), client.model, client.openai_base_url, client.api_key)
