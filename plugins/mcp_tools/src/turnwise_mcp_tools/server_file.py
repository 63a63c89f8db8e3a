"""
Reads servers from the JSON files of other programs, and variables of the environment in their values.

Claude Desktop, Claude Code and Cursor keep servers under `mcpServers`, VS Code under `servers`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog
from attrs import evolve

from turnwise import structure
from turnwise.errors import ConfigError
from turnwise_mcp_tools.config import McpConfig, ServerConfig
from turnwise_strict_json import load_json

_VARIABLE: Final = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_KNOWN: Final = ("command", "args", "env", "cwd", "url", "headers")
# Other programs' keys that do not change the server itself.
_IGNORED: Final = ("type", "transport", "disabled", "autoApprove", "alwaysAllow", "timeout", "description", "gallery")


def servers_of(config: McpConfig) -> dict[str, ServerConfig]:
    """Return the servers of a config and its file by name; `ConfigError` when one is not usable."""
    found = dict(config.servers)
    if config.file is not None:
        for name, server in read_servers(config.file).items():
            if name in found:
                raise ConfigError(f"server {name!r} is in 'servers' and in {config.file}")
            found[name] = server
    if not found:
        raise ConfigError(f"{config.file} has no server that is enabled")
    return {name: _with_variables(name, server) for name, server in found.items()}


def read_servers(path: Path) -> dict[str, ServerConfig]:
    """Read the enabled servers of a file; `ConfigError` names the file and the problem."""
    try:
        content = load_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    sections = content.get("mcpServers", content.get("servers")) if isinstance(content, dict) else None
    if not isinstance(sections, dict):
        raise ConfigError(f"{path} has no 'mcpServers', which maps names to servers")
    return {
        name: _read_server(section, f"{path}: {name}")
        for name, section in sections.items()
        if not (isinstance(section, dict) and section.get("disabled"))
    }


def _read_server(section: object, place: str) -> ServerConfig:
    if not isinstance(section, dict):
        raise ConfigError(f"{place}: a server is an object with 'command' or 'url'")
    if section.get("type", section.get("transport")) == "sse":
        raise ConfigError(f"{place}: the transport 'sse' is not supported; its server may offer streamable HTTP")
    unknown = sorted(section.keys() - {*_KNOWN, *_IGNORED})
    if unknown:
        structlog.get_logger().warning("keys of an MCP server are ignored", server=place, keys=unknown)
    server: ServerConfig = structure({key: section[key] for key in _KNOWN if key in section}, ServerConfig, path=place)
    return server


def _with_variables(name: str, server: ServerConfig) -> ServerConfig:
    """Replace `${NAME}` in all values; `ConfigError` for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ConfigError(f"server {name!r} needs the environment variable {match[1]}, which is not set")
        return found

    def text(before: str) -> str:
        return _VARIABLE.sub(value, before)

    def texts(before: Mapping[str, str]) -> dict[str, str]:
        return {key: text(each) for key, each in before.items()}

    return evolve(
        server,
        command=text(server.command),
        args=tuple(map(text, server.args)),
        env=texts(server.env),
        url=text(server.url),
        headers=texts(server.headers),
    )
