"""Files with servers, as other programs write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise_mcp_tools.config import McpConfig, ServerConfig
from turnwise_mcp_tools.server_file import read_servers, servers_of

CURSOR = {
    "mcpServers": {
        "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "."], "disabled": False},
        "web": {"type": "http", "url": "https://example.org/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}},
        "off": {"command": "x", "disabled": True},
    }
}


def write(folder: Path, content: object) -> Path:
    path = folder / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_file_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers join those of the config, without the disabled ones."""
    monkeypatch.setenv("TOKEN", "t")
    config = McpConfig(servers={"own": ServerConfig(command="own")}, file=write(tmp_path, CURSOR))

    servers = servers_of(config)

    assert list(servers) == ["own", "files", "web"]
    assert servers["files"].args == ("-y", "@modelcontextprotocol/server-filesystem", ".")
    assert servers["web"].headers == {"Authorization": "Bearer t"}


def test_the_section_of_vs_code_is_read_too(tmp_path: Path) -> None:
    """It is named `servers`."""
    assert list(read_servers(write(tmp_path, {"servers": {"a": {"command": "x"}}}))) == ["a"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "Expecting property name"),
        ([], "has no 'mcpServers'"),
        ({"mcpServers": {"a": "x"}}, "a: a server is an object"),
        ({"mcpServers": {"a": {}}}, "set one of 'command' and 'url'"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://h"}}}, "set one of 'command' and 'url'"),
        ({"mcpServers": {"a": {"command": 5}}}, "a.command"),
        ({"mcpServers": {"a": {"url": "ftp://h"}}}, "must start with http"),
        ({"mcpServers": {"a": {"type": "sse", "url": "http://h"}}}, "'sse' is not supported"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: object, problem: str) -> None:
    """The error names the file."""
    path = write(tmp_path, content)

    with pytest.raises(ConfigError, match=problem) as error:
        read_servers(path)
    assert "mcp.json" in str(error.value)


def test_a_missing_file_and_a_file_without_servers(tmp_path: Path) -> None:
    """Both are one line."""
    with pytest.raises(ConfigError, match="No such file"):
        read_servers(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="no server that is enabled"):
        servers_of(McpConfig(file=write(tmp_path, {"mcpServers": {}})))


def test_a_server_has_one_place(tmp_path: Path) -> None:
    """A name in both places is ambiguous."""
    path = write(tmp_path, {"mcpServers": {"a": {"command": "x"}}})

    with pytest.raises(ConfigError, match="server 'a' is in 'servers' and in"):
        servers_of(McpConfig(servers={"a": ServerConfig(command="y")}, file=path))
    with pytest.raises(ValueError, match="set 'servers', 'file', or both"):
        McpConfig()
