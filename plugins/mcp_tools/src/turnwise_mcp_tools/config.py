"""Options of the tools `mcp`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attrs import field, frozen, validators


@frozen(kw_only=True)
class ServerConfig:
    """
    A server: a program that speaks over its standard input and output, or an address (streamable HTTP).

    Attributes:
        command: the program; `python` is the interpreter of this process.
        args: its arguments.
        env: its environment, besides HOME, PATH, USER and the like; `${NAME}` and `${NAME:-default}` are replaced.
        cwd: its working directory.
        url: the address, instead of a command.
        headers: of each request to the address; `${NAME}` is replaced.
    """

    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    cwd: Path | None = None
    url: str = ""
    headers: Mapping[str, str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Check that there is one way to the server; `ValueError` for none or both."""
        if bool(self.command) == bool(self.url):
            raise ValueError("set one of 'command' and 'url'")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"'url' must start with http:// or https://: {self.url!r}")
        if self.url and (self.args or self.env or self.cwd):
            raise ValueError("'args', 'env' and 'cwd' belong to a 'command', not to a 'url'")
        if self.command and self.headers:
            raise ValueError("'headers' belong to a 'url', not to a 'command'")


@frozen(kw_only=True)
class McpConfig:
    """
    The servers, and the tools that the model gets from them.

    Attributes:
        servers: by name.
        file: JSON file with more servers, as other programs have it: `mcpServers`, or `servers`, by name.
        session: `episode` gives each episode a connection, and so a process, per server; `shared` lets the episodes of
            a process that run at the same time share one.
        include: patterns such as `files.read_*` of the tools that the model gets, as `SERVER.TOOL`.
        exclude: patterns of the tools that it does not get.
        prefix: `never` keeps the names of tools, `always` puts `SERVER_` before each, `auto` before names that two
            servers have.
        resources: adds tools `SERVER_list_resources` and `SERVER_read_resource`.
        prompts: adds a tool `SERVER_get_prompt`.
        pictures: the model sees the images in results of tools, which needs a model, an engine and an agent that take
            pictures; without it, the model reads that an image is there.
        start_s: seconds that a server may take to start and to list its tools.
        call_s: seconds that a call may take.
        restarts: number of times that a server that died is started again for one session.
    """

    servers: Mapping[str, ServerConfig] = field(factory=dict)
    file: Path | None = None
    session: Literal["episode", "shared"] = "episode"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    prefix: Literal["never", "always", "auto"] = "auto"
    resources: bool = False
    prompts: bool = False
    pictures: bool = False
    start_s: float = field(default=30.0, validator=validators.gt(0.0))
    call_s: float = field(default=60.0, validator=validators.gt(0.0))
    restarts: int = field(default=1, validator=validators.ge(0))

    def __attrs_post_init__(self) -> None:
        """Check that there is a server; `ValueError` for none."""
        if not self.servers and self.file is None:
            raise ValueError("set 'servers', 'file', or both")
