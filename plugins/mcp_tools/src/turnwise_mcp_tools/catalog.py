"""
Asks the servers of a run for their tools, once, when the run is built.

The schemas are part of every prompt, so they are read before the first episode and stay the same for the run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

from attrs import frozen
from mcp.types import Tool as ListedTool

from turnwise import Tool
from turnwise.errors import ConfigError, InfrastructureError, ToolError
from turnwise.types import ToolSchema
from turnwise_mcp_tools import client_requests
from turnwise_mcp_tools.config import McpConfig
from turnwise_mcp_tools.server_file import servers_of
from turnwise_mcp_tools.tool import Server, ServerTool

_TEXT: Final = {"type": "string"}


@frozen
class _Offer:
    server: Server
    tools: list[ListedTool]
    has_resources: bool
    prompts: list[str]


def build_tools(config: McpConfig) -> tuple[Tool, ...]:
    """
    Return the tools of all servers in the order of the config.

    Raises:
        ConfigError: a server cannot be used, or a pattern fits no tool.
    """
    servers = [Server(name, server, config) for name, server in servers_of(config).items()]
    # The caller may run on an event loop, such as a notebook's, where no other loop can run.
    with ThreadPoolExecutor(1, thread_name_prefix="mcp-catalog") as thread:
        try:
            offers = thread.submit(asyncio.run, _ask_all(servers)).result()
        except InfrastructureError as error:
            raise ConfigError(str(error)) from error
    _check_patterns(config, offers)
    chosen = [
        (offer.server, tool) for offer in offers for tool in offer.tools if _is_chosen(offer.server, tool, config)
    ]
    count = Counter(tool.name for _, tool in chosen)
    tools: list[Tool] = []
    for server, tool in chosen:
        has_prefix = config.prefix == "always" or (config.prefix == "auto" and count[tool.name] > 1)
        name = f"{server.name}_{tool.name}" if has_prefix else tool.name
        request = partial(client_requests.call_tool, tool.name, server.config.pictures)
        schema = _schema(name, tool.description or "", tool.input_schema)
        tools.append(ServerTool(schema, server, request, (tool.name, tool.input_schema)))
    for offer in offers:
        tools.extend(_request_tools(offer, config))
    return tuple(tools)


async def _ask_all(servers: Iterable[Server]) -> list[_Offer]:
    try:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(_ask(server)) for server in servers]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in asked]


async def _ask(server: Server) -> _Offer:
    session, start_s = server.new_session(), server.config.start_s
    deadline = asyncio.get_running_loop().time() + start_s
    await session.open()  # it has the same deadline, and ends the server when that is over
    try:
        async with asyncio.timeout_at(deadline):
            has_resources = await session.ask(client_requests.has_resources)
            tools = await session.ask(client_requests.list_tools)
            prompts = await session.ask(client_requests.list_prompts) if server.config.prompts else []
    except TimeoutError as error:
        raise InfrastructureError(f"MCP server {server.name!r} did not list its tools within {start_s:g} s") from error
    except ToolError as error:
        raise InfrastructureError(f"MCP server {server.name!r}: {str(error).removeprefix('Error: ')}") from error
    finally:
        await session.close()
    return _Offer(server, tools, has_resources, prompts)


def _is_chosen(server: Server, tool: ListedTool, config: McpConfig) -> bool:
    name = f"{server.name}.{tool.name}"
    return any(fnmatchcase(name, each) for each in config.include) and not any(
        fnmatchcase(name, each) for each in config.exclude
    )


def _check_patterns(config: McpConfig, offers: Iterable[_Offer]) -> None:
    """Refuse a pattern that fits no tool, which is a misspelled one."""
    names = [f"{offer.server.name}.{tool.name}" for offer in offers for tool in offer.tools]
    for pattern in (*config.include, *config.exclude):
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"the pattern {pattern!r} fits no tool of {', '.join(names) or 'the servers'}")


def _request_tools(offer: _Offer, config: McpConfig) -> Iterator[Tool]:
    name = offer.server.name
    if config.resources and offer.has_resources:
        text = f"Lists the resources of {name}, one URI in a line."
        yield ServerTool(_schema(f"{name}_list_resources", text), offer.server, client_requests.list_resources)
        schema = _schema(f"{name}_read_resource", f"Reads a resource of {name}.", _object(uri=_TEXT))
        yield ServerTool(schema, offer.server, client_requests.read_resource)
    if offer.prompts:
        parameters = _object(name=_TEXT)
        parameters["properties"]["arguments"] = {"type": "object", "additionalProperties": _TEXT}
        text = "\n".join([f"Returns a prompt of {name}:", *offer.prompts])
        schema = _schema(f"{name}_get_prompt", text, parameters)
        yield ServerTool(schema, offer.server, client_requests.get_prompt)


def _schema(name: str, description: str, parameters: Mapping[str, object] | None = None) -> ToolSchema:
    """Return a schema in the OpenAI form."""
    plain = {"type": "object", "properties": {}, **(parameters or {})}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": plain}}


def _object(**properties: Mapping[str, str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}
