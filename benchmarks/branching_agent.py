"""
An outside program whose conversation branches: three continuations of each first answer, and two of each of these.

    turnwise rollout examples/external_openai/rollout.yaml agent.command='[python, benchmarks/branching_agent.py]' \
        reward=reported --out runs/branches
    python benchmarks/shared_prefixes.py --episodes runs/branches
"""

import json
import os
from typing import Any

from openai import OpenAI

WAYS = (3, 2)


def explore(client: OpenAI, messages: list[Any], depth: int = 0) -> None:
    """Answer a conversation, and continue it in all ways."""
    reply = client.chat.completions.create(model=os.environ["TURNWISE_MODEL"], messages=messages)
    answer = reply.choices[0].message.model_dump(exclude_none=True)
    for way in range(WAYS[depth]) if depth < len(WAYS) else ():
        question = {"role": "user", "content": f"Try again: {way}."}
        explore(client, [*messages, answer, question], depth + 1)


if __name__ == "__main__":
    explore(OpenAI(), json.loads(os.environ["TURNWISE_TASK"])["messages"])
