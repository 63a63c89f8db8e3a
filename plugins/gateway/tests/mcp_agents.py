"""Agents that act on the run's tools, as any client of the Model Context Protocol would, and such a tool."""

import asyncio
import itertools
import json

import aiohttp
from attrs import define, field

from turnwise import ToolResult
from turnwise.errors import InfrastructureError, ToolError

HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


@define(eq=False)
class Tally:
    """A tool with a sum per episode."""

    opened: list = field(factory=list)
    released: list = field(factory=list)
    started: asyncio.Event = field(factory=asyncio.Event)
    ended: asyncio.Event = field(factory=asyncio.Event)

    @property
    def schema(self):
        number = {"type": "integer"}
        parameters = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
        return {"type": "function", "function": {"name": "tally", "description": "Adds up.", "parameters": parameters}}

    async def create(self, task):
        self.opened.append(task.uid)
        return {"sum": 0, "uid": task.uid}

    async def execute(self, session, arguments):
        number = arguments["n"]
        if number == -1:
            raise ToolError("Error: only positive numbers")
        if number == -2:
            raise InfrastructureError("the tool's disk is full")
        if number == -3:
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        session["sum"] += number
        if number == 99:
            return ToolResult(text="handed in", ends_episode=True)
        text = "x" * number if number > 1000 else str(session["sum"])
        return ToolResult(text=text, reward=0.5, metrics={"additions": 1})

    async def release(self, session):
        self.released.append(session["uid"])


class RpcClient:
    """Sends messages to the tools of a session."""

    def __init__(self, client, http):
        self._client, self._http, self._ids = client, http, itertools.count(1)

    async def post(self, message, **headers):
        """Send a message, or bytes; return status and parsed body."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        headers = {"Authorization": f"Bearer {self._client.api_key}", "Content-Type": "application/json", **headers}
        async with self._http.post(self._client.mcp_url, data=body, headers=headers) as response:
            text = await response.text()
        return response.status, json.loads(text) if text else None

    async def ask(self, method, **params):
        """Send a request and return its whole response."""
        request = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        status, reply = await self.post(request)
        assert (200, request["id"]) == (status, reply["id"])
        return reply

    async def call(self, name, **arguments):
        """Call a tool; return whether it failed, and its text."""
        result = (await self.ask("tools/call", name=name, arguments=arguments))["result"]
        (part,) = result["content"]
        return result["isError"], part["text"]


async def ask_model(task, client, http):
    """Make the one call of the model that an episode needs."""
    body = {"model": client.model, "messages": list(task.messages)}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with http.post(f"{client.openai_base_url}/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200


tally = Tally()
"""The tool of the running test."""


async def act(task, client):
    """Say hello, list the tools, and add 2 and 3; report the sum."""
    async with aiohttp.ClientSession() as http:
        rpc = RpcClient(client, http)
        assert "2025-06-18" == (await rpc.ask("initialize", **HELLO))["result"]["protocolVersion"]
        assert (202, None) == await rpc.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        (tool,) = (await rpc.ask("tools/list"))["result"]["tools"]
        assert ("tally", ["n"]) == (tool["name"], tool["inputSchema"]["required"])
        await ask_model(task, client, http)
        assert (False, "2") == await rpc.call("tally", n=2)
        failed, text = await rpc.call("tally", n=3)
        assert not failed
        return float(text)


async def err(task, client):
    """Make calls that fail: the model reads why, and the session stays."""
    async with aiohttp.ClientSession() as http:
        rpc = RpcClient(client, http)
        await ask_model(task, client, http)
        assert (True, "Error: only positive numbers") == await rpc.call("tally", n=-1)
        failed, text = await rpc.call("tally", n="two")
        assert failed
        assert "do not fit" in text
        failed, text = await rpc.call("no_such_tool")
        assert failed
        assert "the tools are: tally" in text
        assert (False, "1") == await rpc.call("tally", n=1)


async def overdo(task, client):
    """Call a tool five times, and once for a long response."""
    async with aiohttp.ClientSession() as http:
        rpc = RpcClient(client, http)
        await ask_model(task, client, http)
        failed, text = await rpc.call("tally", n=5000)
        assert not failed
        assert 100 == len(text)
        assert "...(truncated)..." in text
        results = [await rpc.call("tally", n=1) for _ in range(4)]
        assert [False, False, True, True] == [failed for failed, _ in results]
        assert "has made its 3 tool calls" in results[-1][1]


async def hit_infrastructure(task, client):
    """Call a tool whose service fails."""
    async with aiohttp.ClientSession() as http:
        rpc = RpcClient(client, http)
        await ask_model(task, client, http)
        reply = await rpc.ask("tools/call", name="tally", arguments={"n": -2})
        assert reply["error"]["message"].startswith("engine: ")
        await asyncio.Event().wait()  # the session ends the agent


async def hand_in(task, client):
    """Call the tool that ends the episode; the next calls are refused, and the agent fails at that."""
    async with aiohttp.ClientSession() as http:
        rpc = RpcClient(client, http)
        await ask_model(task, client, http)
        assert (False, "handed in") == await rpc.call("tally", n=99)
        await ask_model(task, client, http)


async def hand_in_and_stay(task, client):
    """Call the tool that ends the episode, and do not end."""
    async with aiohttp.ClientSession() as http:
        await ask_model(task, client, http)
        assert (False, "handed in") == await RpcClient(client, http).call("tally", n=99)
        await asyncio.Event().wait()


async def leave_early(task, client):
    """End while a call is running."""
    async with aiohttp.ClientSession() as http:
        await ask_model(task, client, http)
    asyncio.get_running_loop().create_task(_call_for_ever(client))
    await tally.started.wait()
    raise RuntimeError("the agent dies")


async def cut_a_call(task, client):
    """Break the connection in the middle of a call, and call again."""
    async with aiohttp.ClientSession() as http:
        await ask_model(task, client, http)
        assert (False, "4") == await RpcClient(client, http).call("tally", n=4)
    calling = asyncio.get_running_loop().create_task(_call_for_ever(client))
    await tally.started.wait()
    calling.cancel()
    await tally.ended.wait()
    async with aiohttp.ClientSession() as http:
        assert (False, "5") == await RpcClient(client, http).call("tally", n=1)


async def _call_for_ever(client):
    async with aiohttp.ClientSession() as http:
        await RpcClient(client, http).call("tally", n=-3)
