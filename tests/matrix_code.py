"""The user's own code in the matrix of options: a reward, an environment, an agent, and parts in verl's form."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from turnwise_environments import Observation


def score(episode: Any) -> float:
    """Count the tokens of the response."""
    return float(episode.trajectory.num_response_tokens)


async def solve(task: Any, client: Any) -> None:
    """Ask the model once."""
    body = json.dumps({"model": client.model, "messages": list(task.messages)}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {client.api_key}"}
    request = urllib.request.Request(f"{client.openai_base_url}/chat/completions", body, headers)
    await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())


class Vault:
    """An environment that ends at the first answer."""

    repeatable = True

    def __init__(self, low: int = 1) -> None:
        self.low = low

    def reset(self, task: Any, seed: int) -> Observation:
        return Observation(text="Open it.")

    def step(self, action: Any) -> Observation:
        return Observation(text="Open.", reward=float(self.low), done=True)

    def close(self) -> None: ...


class Adder:
    """A tool in the form of verl 0.5."""

    def __init__(self, config: Any, tool_schema: Any = None) -> None:
        self.name = "adder"

    def get_openai_tool_schema(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "adder", "parameters": {"type": "object", "properties": {}}}}

    async def create(self, instance_id: str, **_options: Any) -> str:
        return instance_id

    async def execute(self, instance_id: str, parameters: Any, **_options: Any) -> tuple[str, float, dict[str, Any]]:
        return "3", 0.0, {}

    async def calc_reward(self, instance_id: str, **_options: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **_options: Any) -> None: ...


class Repeater:
    """A user in verl's form, who is content at once."""

    def __init__(self, config: Any) -> None: ...

    async def start_interaction(self, instance_id: Any = None, **_options: Any) -> Any:
        return instance_id

    async def generate_response(self, instance_id: Any, messages: Any, **_options: Any) -> tuple[bool, str, float, Any]:
        return True, "Right.", 1.0, {}

    async def finalize_interaction(self, instance_id: Any) -> None: ...
