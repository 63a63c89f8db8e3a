"""The tool `python`: what the model writes is run, and what it prints is what the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from turnwise.errors import InfrastructureError
from turnwise.protocols import Resources
from turnwise.types import Task, ToolResult
from turnwise_python_sandbox.config import PythonToolConfig
from turnwise_python_sandbox.result import RunResult, Status

if TYPE_CHECKING:
    from turnwise_python_sandbox.sandbox import Sandbox
    from turnwise_python_sandbox.session import Session

_CUT: Final = "\n... ({} characters left out) ...\n"
_VERDICTS: Final[Mapping[Status, str]] = {
    Status.TIMEOUT: "TimeoutError: the program took longer than {timeout_s:g} seconds and was stopped",
    Status.MEMORY: "MemoryError: the program used more than {memory_mb} MB and was stopped",
    Status.OUTPUT_LIMIT: "the program printed more than {max_output_bytes} bytes and was stopped",
    Status.DISK_LIMIT: "the program wrote more than {disk_mb} MB or {max_files} files and was stopped",
    Status.CRASHED: "the program crashed (exit code {exit_code})",
}
_SESSION_LOST: Final = "the interpreter was restarted; its variables are gone"


class PythonTool:
    """
    Runs Python code; one sandbox serves all episodes of a process.

    Args:
        config: limits, tier, and what the model reads.
        resources: not used.
    """

    def __init__(self, config: PythonToolConfig, resources: Resources) -> None:
        self._config = config
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": "python",
                "description": config.description,
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": "The program."}},
                    "required": ["code"],
                    "additionalProperties": False,
                },
            },
        }

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of this process; it starts with the first call."""
        from turnwise_python_sandbox.sandbox import shared_sandbox

        return shared_sandbox(self._config.sandbox)

    async def create(self, task: Task) -> Session | None:
        """Begin an episode: with an interpreter of its own if the tool is persistent."""
        return await self.sandbox.asession() if self._config.persistent else None

    async def execute(self, session: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Run one program.

        Raises:
            InfrastructureError: the sandbox failed; it says nothing about the program.
        """
        code = arguments["code"]
        result: RunResult = await (self.sandbox if session is None else session).arun(code)
        if result.status is Status.INFRA_ERROR:
            raise InfrastructureError(f"the sandbox failed: {result.stderr}")
        metrics = {"sandbox_wall_s": result.wall_s, "sandbox_tier": float(result.tier)}
        return ToolResult(text=observation(result, self._config), error=result.status is not Status.OK, metrics=metrics)

    async def release(self, session: Any) -> None:
        """End the episode's interpreter."""
        if session is not None:
            session.close()


def observation(result: RunResult, config: PythonToolConfig) -> str:
    """Return what the model reads of a result: output, errors, and the verdict when a limit ended it."""
    parts = [result.stdout.rstrip("\n"), _errors(result.stderr.rstrip("\n"), config.errors)]
    known = {name: getattr(config.sandbox, name) for name in ("timeout_s", "memory_mb", "max_output_bytes")}
    known |= {"disk_mb": config.sandbox.disk_mb, "max_files": config.sandbox.max_files, "exit_code": result.exit_code}
    end = [_VERDICTS[result.status].format_map(known)] if result.status in _VERDICTS else []
    end += [_SESSION_LOST] if result.session_lost else []
    room = config.max_chars - sum(len(line) + 1 for line in end)
    text = truncate("\n".join(filter(None, parts)), max(room, 0), config.truncate)
    return "\n".join(filter(None, [text, *end])) or config.empty_output


def _errors(text: str, shown: str) -> str:
    if shown == "last_line":
        return text.rpartition("\n")[2]
    return text if shown == "after" else ""


def truncate(text: str, max_chars: int, keep: str) -> str:
    """
    Cut a text to a length, and say in its place how much is missing.

    Args:
        text: what is cut.
        max_chars: most characters of the answer; where not even the notice fits, the text is cut without it.
        keep: the head, the tail, or the middle's surroundings: "head", "tail", "middle".
    """
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_CUT.format(len(text)))
    if room <= 0:
        return text[:max_chars]
    head = {"head": room, "tail": 0}.get(keep, room // 2)
    notice = _CUT.format(len(text) - room)
    return text[:head] + notice + text[len(text) - (room - head) :]
