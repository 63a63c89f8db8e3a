"""Files with servers as Claude Desktop, Claude Code, Cursor and VS Code have them: forms, variables and comments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise_mcp_tools import make_tools
from turnwise_mcp_tools.config import McpConfig, ServerConfig
from turnwise_mcp_tools.server_file import servers_of

SERVER = Path(__file__).with_name("notes_server.py")
CLAUDE_DESKTOP = '{"mcpServers": {"notes": {"command": "%(python)s", "args": ["%(server)s"], "env": {"KEY": "k"}}}}'
CLAUDE_CODE = """
{"mcpServers": {"notes": {"type": "stdio", "command": "${PYTHON:-%(python)s}", "args": ["%(server)s"], "env": {}}}}
"""
CURSOR = """{
  "mcpServers": {
    "notes": {
      "command": "%(python)s",
      "args": ["${workspaceFolder}/notes_server.py"],
      "env": { "HOME_OF": "${userHome}" },
      "envFile": "${workspaceFolder}/.env"
    }
  }
}"""
VS_CODE = """{
  // Servers of this workspace.
  "inputs": [],
  "servers": {
    "notes": {
      "type": "stdio",
      "command": "%(python)s", /* the interpreter */
      "args": ["${workspaceFolder}/notes_server.py",],
      "cwd": "${workspaceFolder}",
      "envFile": "${workspaceFolder}/.env",
    },
  },
}"""
VS_CODE_SETTINGS = """
{"editor.tabSize": 2, "mcp": {"servers": {"notes": {"command": "%(python)s", "args": ["%(server)s"]}}}}
"""
FILES = {
    "Claude Desktop": ("claude_desktop_config.json", CLAUDE_DESKTOP),
    "Claude Code": (".mcp.json", CLAUDE_CODE),
    "Cursor": (".cursor/mcp.json", CURSOR),
    "VS Code": (".vscode/mcp.json", VS_CODE),
    "VS Code's settings": (".vscode/settings.json", VS_CODE_SETTINGS),
    "a BOM": ("bom.json", "\ufeff" + CLAUDE_DESKTOP),
}


def write(folder: Path, name: str, text: str) -> Path:
    (folder / "notes_server.py").write_text(SERVER.read_text())
    (folder / ".env").write_text("# keys\n\nTOKEN=a=b\nexport QUOTED=\"two words\"\n  SINGLE = 'x # y' \nEMPTY=\n")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text % {"python": sys.executable, "server": SERVER}, encoding="utf-8")
    return path


@pytest.mark.many_cases(2)
@pytest.mark.parametrize(("name", "text"), FILES.values(), ids=FILES)
def test_the_tools_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """The server of the file starts, and its tools are those of the model."""
    monkeypatch.delenv("PYTHON", raising=False)
    tools = make_tools(McpConfig(file=write(tmp_path, name, text)), Resources())
    assert "add_note" in [tool.schema["function"]["name"] for tool in tools]


@pytest.mark.parametrize("name", ["Cursor", "VS Code"])
def test_a_file_of_variables(tmp_path: Path, name: str) -> None:
    """`envFile` gives the server its variables, of which `env` replaces some; other programs' names are known."""
    (server,) = servers_of(McpConfig(file=write(tmp_path, *FILES[name]))).values()

    assert server.env.items() >= {"TOKEN": "a=b", "QUOTED": "two words", "SINGLE": "x # y", "EMPTY": ""}.items()
    assert server.args == (f"{tmp_path}/notes_server.py",)
    assert name == "VS Code" or server.env["HOME_OF"] == str(Path.home())
    assert name == "Cursor" or server.cwd == tmp_path


def test_env_wins_over_the_file(tmp_path: Path) -> None:
    """As in the other programs."""
    server = {"command": "x", "envFile": str(tmp_path / ".env"), "env": {"TOKEN": "mine"}}
    path = write(tmp_path, "mcp.json", json.dumps({"mcpServers": {"a": server}}))
    assert servers_of(McpConfig(file=path))["a"].env["TOKEN"] == "mine"


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"command": "x", "env": {"KEY": "${input:api-key}"}}, r"\$\{input:api-key\}.*write \$\{NAME\}"),
        ({"url": "https://h/mcp", "headers": {"Authorization": "Bearer ${input:token}"}}, r"\$\{input:token\}"),
        ({"command": "x", "args": ["${command:pick}"]}, r"\$\{command:pick\}"),
        ({"command": "x", "args": ["${config:python.path}"]}, r"\$\{config:python.path\}"),
        ({"command": "x", "envFile": "none.env"}, r"none.env: No such file"),
        ({"command": "x", "env": {"KEY": "${NOT_SET_AT_ALL}"}}, "environment variable NOT_SET_AT_ALL"),
    ],
    ids=["input", "input in a header", "command", "setting", "no file of variables", "not set"],
)
def test_what_only_the_other_program_knows(tmp_path: Path, section: dict[str, object], text: str) -> None:
    """A value that it asks its user for never reaches the server as it is written; the line says what to write."""
    path = write(tmp_path, "mcp.json", json.dumps({"servers": {"a": section}}))
    with pytest.raises(ConfigError, match=text):
        servers_of(McpConfig(file=path))


def test_comments_are_those_outside_of_texts(tmp_path: Path) -> None:
    """What looks like one in a text is the text's."""
    text = '{"servers": {"a": {"url": "https://h/a,]//b", "headers": {"x": "/* y */ \\" // z"}} // end\n}}'
    path = tmp_path / "mcp.json"
    path.write_text(text)
    assert servers_of(McpConfig(file=path)) == {
        "a": ServerConfig(url="https://h/a,]//b", headers={"x": '/* y */ " // z'})
    }
