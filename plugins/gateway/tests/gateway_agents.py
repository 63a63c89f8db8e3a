"""Agents that the tests run: they know the model's API and nothing of turnwise."""

import json
from types import SimpleNamespace

import aiohttp

from turnwise_testing.probes.agent import probe_resources

TOOLS = [dict(schema) for schema in probe_resources().tool_schemas]


class RefusedError(Exception):
    """The model's API refused a call."""


async def converse(task, client):
    """Call the model until it answers without a call, and add numbers for it; report 0.5 as the score."""
    messages = [dict(message) for message in task.messages]
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for _ in range(40):
            body = {"model": client.model, "messages": messages, "tools": TOOLS}
            async with http.post(f"{client.openai_base_url}/chat/completions", json=body) as response:
                answer = await response.json()
            if response.status != 200:
                raise RefusedError(answer["error"]["message"])
            message = answer["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return 0.5
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": run(call)} for call in message["tool_calls"]
            ]
    return None


async def converse_twice(task, client):
    """Hold the conversation of the task and another one."""
    await converse(task, client)
    return await converse(SimpleNamespace(messages=[{"role": "user", "content": "Another question?"}]), client)


def run(call):
    """Return the result of a call, or the reason why there is none."""
    try:
        arguments = json.loads(call["function"]["arguments"])
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"Error: {error!r}"


async def swallow(task, client):
    """Report a score although the only call was refused."""
    body = {"model": client.model, "messages": [{"role": "user", "content": "Hi."}], "stop": ["x"]}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{client.openai_base_url}/chat/completions", json=body) as response,
    ):
        assert response.status == 400
    return 1.0


async def fail_after_a_refusal(task, client):
    """End with an own error after a refused call; `extra` of the task says whether calls are served before."""
    if task.extra["served"]:
        await converse(task, client)
    body = {"model": client.model, "messages": [{"role": "user", "content": "Hi."}], "n": 3}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{client.openai_base_url}/chat/completions", json=body) as response,
    ):
        assert response.status == 400
    raise RefusedError("no idea")


async def be_silent(task, client):
    """End without a call."""


async def report_nonsense(task, client):
    """Report a score that is no number."""
    await converse(task, client)
    return float("nan")
