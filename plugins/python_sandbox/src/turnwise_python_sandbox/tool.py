"""The tool `python`: runs the code that a model wrote, and returns its output as the observation."""

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
_LIMIT_MESSAGES: Final[Mapping[Status, str]] = {
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
        config: limits, tier, and form of the observation.
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
        """The sandbox of this process; it starts at the first call."""
        from turnwise_python_sandbox.sandbox import shared_sandbox

        return shared_sandbox(self._config.sandbox)

    async def create(self, task: Task) -> Session | None:
        return await self.sandbox.asession() if self._config.persistent else None

    async def execute(self, session: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Run one program.

        Raises:
            InfrastructureError: the sandbox failed, so there is no result of the program.
        """
        code = arguments["code"]
        result: RunResult = await (self.sandbox if session is None else session).arun(code)
        if result.status is Status.INFRA_ERROR:
            raise InfrastructureError(f"the sandbox failed: {result.stderr}")
        # The metrics of an episode's calls are added up: a sum of tiers would say nothing, numbers of calls do.
        metrics = {"sandbox_wall_s": result.wall_s, f"sandbox_calls_in_tier_{int(result.tier)}": 1.0}
        text = format_observation(result, self._config)
        return ToolResult(text=text, error=result.status is not Status.OK, metrics=metrics)

    async def release(self, session: Any) -> None:
        if session is not None:
            await session.aclose()


def format_observation(result: RunResult, config: PythonToolConfig) -> str:
    """Return the observation of a result: output, errors, and the reason if a limit ended the program."""
    parts = [result.stdout.rstrip("\n"), _select_errors(result.stderr.rstrip("\n"), config.errors)]
    limits = ("timeout_s", "memory_mb", "max_output_bytes", "disk_mb", "max_files")
    known = {name: getattr(config.sandbox, name) for name in limits} | {"exit_code": result.exit_code}
    end = [_LIMIT_MESSAGES[result.status].format_map(known)] if result.status in _LIMIT_MESSAGES else []
    end += [_SESSION_LOST] if result.session_lost else []
    room = config.max_chars - sum(len(line) + 1 for line in end)
    text = truncate("\n".join(filter(None, parts)), max(room, 0), config.truncate)
    return "\n".join(filter(None, [text, *end])) or config.empty_output


def _select_errors(text: str, shown: str) -> str:
    if shown == "last_line":
        return text.rpartition("\n")[2]
    return text if shown == "after" else ""


def truncate(text: str, max_chars: int, keep: str) -> str:
    """
    Cut a text to a length, and put the number of missing characters in the place of the cut.

    Args:
        text: the whole text.
        max_chars: longest result; if the notice itself does not fit, the text is cut without one.
        keep: "head" or "tail" to keep that end; "middle" to keep both ends and cut the middle.
    """
    if len(text) <= max_chars:
        return text
    room = max_chars - len(_CUT.format(len(text)))
    if room <= 0:
        return text[:max_chars]
    head = {"head": room, "tail": 0}.get(keep, room // 2)
    notice = _CUT.format(len(text) - room)
    return text[:head] + notice + text[len(text) - (room - head) :]
