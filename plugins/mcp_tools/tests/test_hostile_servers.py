"""Servers that never become usable end soon after the time that they may take, and nothing of them grows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise_mcp_tools import connection, make_tools
from turnwise_mcp_tools.config import McpConfig, ServerConfig
from turnwise_mcp_tools.last_lines import LastLines

pytestmark = pytest.mark.usefixtures("starts_a_process")

SERVER = Path(__file__).with_name("hostile_server.py")
STARTS = ("", "deaf", "mute", "deaf mute", "deaf flood", "deaf long", "deaf stderr", "deaf child", "flood stderr child")
LISTS = ("slow", "pages", "deaf slow", "deaf pages stderr")


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.many_cases(2)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
@pytest.mark.parametrize("ways", [*STARTS, *LISTS])
def test_a_start_ends_with_its_time(ways: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However a server behaves, its process ends, and the start with it, long before a close gives up waiting."""
    import mcp.client.stdio

    monkeypatch.setattr(connection, "CLOSE_S", 3600.0)
    for name in ("PROCESS_TERMINATION_TIMEOUT", "FORCE_KILL_TIMEOUT"):  # what is shown is their order
        monkeypatch.setattr(mcp.client.stdio, name, 0.1)
    pids = tmp_path / "pids"
    server = ServerConfig(command="python", args=(str(SERVER), *ways.split()), env={"PIDS": str(pids)})
    for start_s in (1.0, 5.0, 60.0):  # the first in which a busy machine starts the program
        config = McpConfig(servers={"bad": server}, start_s=start_s, call_s=3600.0)
        with pytest.raises(ConfigError, match="MCP server 'bad'"):
            make_tools(config, Resources())
        if pids.exists():
            break

    first, *children = json.loads(pids.read_text())
    for child in children:  # it has left the group of the server, so nobody else ends it
        os.kill(child, signal.SIGKILL)
    assert not is_alive(first)


@given(st.lists(st.binary(max_size=200) | st.text("ab \n", max_size=200).map(str.encode), max_size=60))
def test_the_last_lines_of_whatever_is_written(parts: list[bytes]) -> None:
    """The last three lines that are not empty are kept, of however much is written, and also if nobody has read it."""

    async def read() -> list[str]:
        async with LastLines.of_pipe() as lines:
            for number, part in enumerate(parts):
                os.write(lines.pipe.fileno(), part)
                if number % 2:
                    await asyncio.sleep(0)
            return lines.read()

    whole = b"".join(parts)[-4096:].decode(errors="replace").splitlines()
    assert [line.strip() for line in whole if line.strip()][-3:] == asyncio.run(read())
