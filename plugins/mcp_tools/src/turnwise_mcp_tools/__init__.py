"""Registers `mcp`, the tools of servers of the Model Context Protocol."""

from __future__ import annotations

from turnwise import Registry, Resources, Tool, hookimpl
from turnwise_mcp_tools.config import McpConfig


def make_tools(config: McpConfig, _resources: Resources) -> tuple[Tool, ...]:
    """Ask each server for its tools; `ConfigError` when one cannot be reached or two tools have one name."""
    from turnwise_mcp_tools.catalog import build_tools

    return build_tools(config)


@hookimpl
def register_tools(registry: Registry[Tool | tuple[Tool, ...]]) -> None:
    """Register the tools of servers."""
    registry.add("mcp", make_tools, config=McpConfig)
