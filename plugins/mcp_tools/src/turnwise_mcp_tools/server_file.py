"""
Reads servers from the JSON files of other programs, and variables of the environment in their values.

Claude Desktop, Claude Code and Cursor keep servers under `mcpServers`, VS Code under `servers`, which its settings have
in `mcp`. Cursor and VS Code allow comments and commas at the end, and have names for folders.
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
from turnwise.files import expanded
from turnwise_mcp_tools.config import McpConfig, ServerConfig
from turnwise_strict_json import load_json

_VARIABLE: Final = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_FOREIGN: Final = re.compile(r"\$\{(?:input|command|config|prompt):[^}]*\}")
"""What only the program that the file belongs to can fill in."""
_COMMENT: Final = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA: Final = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])')
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
        content = load_json(_without_comments(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    content = content if isinstance(content, dict) else {}
    inner = content.get("mcp")
    inner = inner if isinstance(inner, dict) else {}
    sections = content.get("mcpServers", content.get("servers", inner.get("servers")))
    if not isinstance(sections, dict):
        raise ConfigError(f"{path} has no 'mcpServers', which maps names to servers")
    return {
        name: _read_server(_with_folders(section, path), f"{path}: {name}", path)
        for name, section in sections.items()
        if not (isinstance(section, dict) and section.get("disabled"))
    }


def _without_comments(text: str) -> str:
    """Return a text without comments and without commas at the end of lists, which JSON does not have."""
    for pattern in (_COMMENT, _LAST_COMMA):
        text = pattern.sub(lambda match: match[1] or " ", text)
    return text


def _with_folders(value: object, path: Path) -> object:
    """Return a value of a file in which the names that Cursor and VS Code have for folders are replaced."""
    if isinstance(value, dict):
        return {key: _with_folders(each, path) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_folders(each, path) for each in value]
    if not isinstance(value, str):
        return value
    folder = path.absolute().parent
    workspace = folder.parent if folder.name in (".vscode", ".cursor") else folder
    names = {
        "workspaceFolder": str(workspace),
        "workspaceFolderBasename": workspace.name,
        "userHome": str(Path.home()),
        "pathSeparator": os.sep,
        "/": os.sep,
    }
    for name, found in names.items():
        value = value.replace(f"${{{name}}}", found)
    return value


def _read_variables(file: Path, place: str) -> dict[str, str]:
    """Return the variables of a file with lines NAME=VALUE; `ConfigError` names what cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}.envFile: {file}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        name, is_set, value = line.strip().removeprefix("export ").partition("=")
        if not name or name.startswith("#"):
            continue
        if not is_set:
            raise ConfigError(f"{place}.envFile: {file}, line {number}: expected NAME=VALUE")
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        found[name.strip()] = value[1:-1] if quoted else value
    return found


def _read_server(section: object, place: str, path: Path) -> ServerConfig:
    if not isinstance(section, dict):
        raise ConfigError(f"{place}: a server is an object with 'command' or 'url'")
    if section.get("type", section.get("transport")) == "sse":
        raise ConfigError(f"{place}: the transport 'sse' is not supported; its server may offer streamable HTTP")
    unknown = sorted(section.keys() - {*_KNOWN, *_IGNORED, "envFile"})
    if unknown:
        structlog.get_logger().warning("keys of an MCP server are ignored", server=place, keys=unknown)
    if isinstance(section.get("envFile"), str):
        file = path.parent / expanded(section["envFile"])
        section = section | {"env": _read_variables(file, place) | (section.get("env") or {})}
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
        if foreign := _FOREIGN.search(before):
            hint = "write ${NAME} instead, and set this variable of the environment"
            raise ConfigError(f"server {name!r}: only the program of the file can fill in {foreign[0]}; {hint}")
        return _VARIABLE.sub(value, before)

    def texts(before: Mapping[str, str]) -> dict[str, str]:
        return {key: text(each) for key, each in before.items()}

    return evolve(
        server,
        command=text(server.command),
        args=tuple(map(text, server.args)),
        env=texts(server.env),
        cwd=None if server.cwd is None else Path(text(str(server.cwd))),
        url=text(server.url),
        headers=texts(server.headers),
    )
