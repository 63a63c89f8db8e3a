"""
An agent that runs elsewhere: it leases tasks, solves them with a calculator, and scores its answers itself.

    python examples/external_pull/agent.py CONTROL_FILE
"""

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

from turnwise_calculator_demo.calculator import calculator

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Computes one arithmetic operation.", "parameters": PARAMETERS}
ROWS = [json.loads(line) for line in Path(__file__).with_name("tasks.jsonl").read_text().splitlines()]
ANSWERS = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in ROWS}


def run(arguments: str) -> str:
    """Return the result of a call, or the reason why there is none."""
    try:
        return calculator(json.loads(arguments)["expression"])
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {error}"


def solve(task: dict[str, Any], session: dict[str, str]) -> float:
    """Converse with the model about a task, and return 1 for a right answer and 0 for a wrong one."""
    client = OpenAI(base_url=session["openai_base_url"], api_key=session["api_key"])
    messages = list(task["messages"])
    tools = [{"type": "function", "function": FUNCTION}]
    for _ in range(6):
        message = (
            client.chat.completions.create(model=session["model"], messages=messages, tools=tools).choices[0].message
        )
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)})
    return float(ANSWERS[task["messages"][0]["content"]] in (message.content or ""))


def post(file: Path, path: str, **body: object) -> dict[str, Any] | None:
    """Send a request to the control port, and return its reply; None for an empty one."""
    access = json.loads(file.read_text())
    headers = {"Authorization": f"Bearer {access['secret']}"}
    request = urllib.request.Request(access["url"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        text = response.read()
    return json.loads(text) if text else None


def work(file: Path) -> None:
    """Solve tasks while the control port is open."""
    while not file.exists():
        time.sleep(0.1)
    while file.exists():
        try:
            leased = post(file, "/tasks/lease", worker="example", wait_s=10)
            if leased is not None:
                score = solve(leased["task"], leased["session"])
                lease = leased["lease"]
                post(file, f"/leases/{lease['id']}/complete", fence=lease["fence"], score=score)
        except (OSError, OpenAIError) as error:  # the port has closed, or the lease was lost: the next lease says which
            print(f"a task was lost: {error}")


work(Path(sys.argv[1]))
