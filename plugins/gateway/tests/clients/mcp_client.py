"""The client of the package `mcp`: `python mcp_client.py URL KEY` prints what it saw of a server's tools as JSON."""

import asyncio
import json
import sys

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client


async def main(url, key):
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        tools = await client.list_tools()
        good = await client.call_tool("add", {"a": 1, "b": 2})
        bad = await client.call_tool("drop", {})
        try:
            await client.list_resources()
        except MCPError as error:
            code = error.error.code
        return {
            "version": client.protocol_version,
            "tools": [tool.name for tool in tools.tools],
            "required": tools.tools[0].input_schema["required"],
            "good": [good.is_error, good.content[0].text],
            "bad": [bad.is_error, bad.content[0].text],
            "code": code,
        }


print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
