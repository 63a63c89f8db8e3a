"""Requests to a server: its lists, all pages of them, and the calls behind the tools of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp import Client
from mcp.types import Tool as ListedTool

from turnwise import ToolResult
from turnwise_mcp_tools.contents import text_of_prompt, text_of_resource, text_of_result, with_pictures


async def list_tools(client: Client) -> list[ListedTool]:
    """Return the tools of a server; none when it has no tools."""
    if not client.server_capabilities.tools:
        return []
    page = await client.list_tools(cache_mode="refresh")
    found = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor, cache_mode="refresh")
        found += page.tools
    return found


async def list_prompts(client: Client) -> list[str]:
    """Return a line for each prompt: its name, arguments and description."""
    if not client.server_capabilities.prompts:
        return []
    page = await client.list_prompts()
    found = list(page.prompts)
    while page.next_cursor:
        page = await client.list_prompts(cursor=page.next_cursor)
        found += page.prompts
    return [
        f"{prompt.name}({', '.join(argument.name for argument in prompt.arguments or ())}): {prompt.description or ''}"
        for prompt in found
    ]


async def has_resources(client: Client) -> bool:
    """Return whether a server has resources."""
    return bool(client.server_capabilities.resources)


async def call_tool(name: str, pictures: bool, client: Client, arguments: Mapping[str, object]) -> ToolResult:
    """Call the tool `name` of a server; `pictures` makes pictures of its images."""
    result = await client.call_tool(name, dict(arguments))
    if pictures:
        return with_pictures(result)
    return ToolResult(text=text_of_result(result), error=bool(result.is_error))


async def list_resources(client: Client, _arguments: Mapping[str, object]) -> ToolResult:
    """Return a line for each resource, and for each template of resources."""
    page = await client.list_resources()
    resources = list(page.resources)
    while page.next_cursor:
        page = await client.list_resources(cursor=page.next_cursor)
        resources += page.resources
    lines = [f"{each.uri}: {each.description or each.name}" for each in resources]
    templates = (await client.list_resource_templates()).resource_templates
    lines += [f"{each.uri_template}: {each.description or each.name}" for each in templates]
    return ToolResult(text="\n".join(lines) or "There are no resources.")


async def read_resource(client: Client, arguments: Mapping[str, Any]) -> ToolResult:
    """Return the text of the resource `uri`."""
    return ToolResult(text=text_of_resource(await client.read_resource(arguments["uri"])))


async def get_prompt(client: Client, arguments: Mapping[str, Any]) -> ToolResult:
    """Return the messages of the prompt `name` with its `arguments`."""
    values = {key: str(value) for key, value in arguments.get("arguments", {}).items()}
    return ToolResult(text=text_of_prompt(await client.get_prompt(arguments["name"], values)))
