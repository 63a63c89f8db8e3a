"""The tools `shell`, `python`, `read_file` and so on, which share the workspace of an episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from attrs import evolve, field, frozen

from turnwise import Report, Resources, Task, ToolResult
from turnwise.errors import ToolError
from turnwise.report import shorten_middle
from turnwise.types import ToolSchema
from turnwise_workspaces.config import WorkspaceToolsConfig
from turnwise_workspaces.owner import OwnedWorkspace
from turnwise_workspaces.use import WorkspaceUse, make_use
from turnwise_workspaces.workspace import Command, ExecResult

_MAX_EDITED_BYTES: Final = 16 * 2**20
_MAX_REPORT: Final = 16_384
"""Characters of a command's output in the results of a run; an episode has many commands."""
Run = Callable[[WorkspaceToolsConfig, OwnedWorkspace, Mapping[str, Any]], Awaitable[ToolResult]]


@frozen(eq=False)
class WorkspaceTool:
    """
    A tool of the model.

    Attributes:
        schema: which the model sees.
        use: the workspaces.
        config: the options.
        run: what a call does.
    """

    schema: ToolSchema
    use: WorkspaceUse = field(repr=False)
    config: WorkspaceToolsConfig = field(repr=False)
    run: Run

    @property
    def session_key(self) -> object:
        """The tools of a run use one workspace in an episode."""
        return self.use

    async def create(self, task: Task) -> OwnedWorkspace:
        """Start the workspace of an episode, as `WorkspaceUse.open` says."""
        return await self.use.open(task)

    async def execute(self, session: Any, arguments: Mapping[str, Any]) -> ToolResult:
        return await self.run(self.config, session, arguments)

    async def release(self, session: Any) -> None:
        await self.use.owner.close(session)

    async def close_kept(self) -> None:
        """End the warm workspaces."""
        await self.use.owner.warm.close()


async def _shell(config: WorkspaceToolsConfig, workspace: OwnedWorkspace, arguments: Mapping[str, Any]) -> ToolResult:
    command = Command(
        argv=(config.shell, "-c", arguments["command"]),
        timeout_s=config.command_s,
        max_output_bytes=config.max_output_bytes,
    )
    result = await workspace.exec(command)
    metrics = {"workspace_commands": 1.0, "workspace_wall_s": result.wall_s}
    text, failed = describe_result(result, command), result.exit_code != 0
    return ToolResult(text=text, metrics=metrics, error=failed, report=_report(arguments["command"], text, result))


async def _python(config: WorkspaceToolsConfig, workspace: OwnedWorkspace, arguments: Mapping[str, Any]) -> ToolResult:
    code = arguments["code"]
    command = Command(
        argv=(config.python, "-"),
        stdin=_encoded(code),
        timeout_s=config.command_s,
        max_output_bytes=config.max_output_bytes,
    )
    result = await workspace.exec(command)
    metrics = {"workspace_programs": 1.0, "workspace_wall_s": result.wall_s}
    # Not the exit code below a traceback: an agent may show the last line of a failed program's text alone.
    shown = describe_result(
        evolve(result, exit_code=0) if result.exit_code and result.stdout.strip() else result, command
    )
    return ToolResult(text=shown, metrics=metrics, error=result.exit_code != 0, report=_report(code, shown, result))


async def _read_file(
    config: WorkspaceToolsConfig, workspace: OwnedWorkspace, arguments: Mapping[str, Any]
) -> ToolResult:
    most = config.max_read_bytes
    data = await workspace.read(arguments["path"], max_bytes=most + 1)
    text = data[:most].decode(errors="replace")
    return ToolResult(text=text + (f"\n[only the first {most} bytes]" if len(data) > most else ""))


async def _write_file(
    _config: WorkspaceToolsConfig, workspace: OwnedWorkspace, arguments: Mapping[str, Any]
) -> ToolResult:
    data = _encoded(arguments["content"])
    await workspace.write(arguments["path"], data)
    return ToolResult(text=f"wrote {len(data)} bytes")


async def _edit_file(
    _config: WorkspaceToolsConfig, workspace: OwnedWorkspace, arguments: Mapping[str, Any]
) -> ToolResult:
    path, old, new = arguments["path"], _encoded(arguments["old"]), _encoded(arguments["new"])
    if not old:
        raise ToolError("Error: 'old' is empty; give the text to replace")
    data = await workspace.read(path, max_bytes=_MAX_EDITED_BYTES + 1)
    if len(data) > _MAX_EDITED_BYTES:
        raise ToolError(f"Error: {path!r} has more than {_MAX_EDITED_BYTES} bytes; edit it with a command")
    count = data.count(old)
    if count != 1:
        found = f"is there {count} times; add lines around it" if count else "is not in the file"
        raise ToolError(f"Error: nothing was changed: 'old' must be in {path!r} once, and it {found}")
    await workspace.write(path, data.replace(old, new))
    return ToolResult(text="replaced 1 place")


async def _submit(
    _config: WorkspaceToolsConfig, _workspace: OwnedWorkspace, _arguments: Mapping[str, object]
) -> ToolResult:
    return ToolResult(text="submitted", metrics={"workspace_submitted": 1.0}, ends_episode=True)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ToolError(f"Error: the text has a character that no file can have, at place {error.start}") from error


def describe_result(result: ExecResult, command: Command) -> str:
    """Return what the model reads about a command: its output, and a line if it did not simply succeed."""
    text = result.stdout.decode(errors="replace").rstrip("\n")
    notes = []
    if result.truncated:
        notes.append(f"[only the first {command.max_output_bytes} bytes of the output]")
    if result.timed_out:
        notes.append(f"[killed after {command.timeout_s:g} s]")
    elif result.limit:
        notes.append(f"[killed: the workspace passed its limit of {result.limit}]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    return "\n".join(filter(None, [text, *notes])) or "(no output)"


def _report(text: str, output: str, result: ExecResult) -> Report:
    """Return what people see of a command."""
    code = "none" if result.exit_code is None else f"{result.exit_code}"
    return Report(
        title=text,
        text=shorten_middle(output, _MAX_REPORT),
        facts={"exit code": code, "seconds": round(result.wall_s, 3)},
        failed=result.exit_code != 0,
    )


_PATH: Final = {"type": "string", "description": "Absolute, or relative to the working folder."}
_TOOLS: Final[Mapping[str, tuple[Run, str, Mapping[str, Any]]]] = {
    "shell": (
        _shell,
        "Run a command in the workspace and read its output. Files and background processes stay for the next call.",
        {"command": {"type": "string", "description": "Text for the shell."}},
    ),
    "python": (
        _python,
        "Run a Python program in the workspace and read its output. Files stay for the next call, variables do not.",
        {"code": {"type": "string", "description": "The program."}},
    ),
    "read_file": (_read_file, "Read a file of the workspace.", {"path": _PATH}),
    "write_file": (
        _write_file,
        "Write a file of the workspace, and replace what it holds.",
        {"path": _PATH, "content": {"type": "string", "description": "The whole new content."}},
    ),
    "edit_file": (
        _edit_file,
        "Replace a text in a file of the workspace; it must be there exactly once.",
        {
            "path": _PATH,
            "old": {"type": "string", "description": "The text to replace."},
            "new": {"type": "string", "description": "The text in its place."},
        },
    ),
    "submit": (
        _submit,
        "End the work and hand it in. Nothing can be changed afterwards.",
        {"message": {"type": "string", "description": "A note about the work; it may be left out."}},
    ),
}
_OPTIONAL: Final = frozenset({"message"})


def make_tools(config: WorkspaceToolsConfig, resources: Resources) -> tuple[WorkspaceTool, ...]:
    """
    Build the tools.

    Raises:
        ConfigError: the options do not fit the backend.
        PluginError: the backend is unknown, or cannot be built.
    """
    use = make_use(config, resources)
    return tuple(WorkspaceTool(_schema(name), use, config, _TOOLS[name][0]) for name in config.tools)


def _schema(name: str) -> ToolSchema:
    _, description, properties = _TOOLS[name]
    parameters = {
        "type": "object",
        "properties": dict(properties),
        "required": [each for each in properties if each not in _OPTIONAL],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
