"""The program of an agent inside the workspace of its episode, from which it reaches its session and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import structlog
from attrs import define, field

from turnwise.errors import InfrastructureError
from turnwise_gateway.programs.lines import Lines
from turnwise_gateway.programs.program import MAX_TAIL, ProgramFailedError, describe_end
from turnwise_workspaces.owner import OwnedWorkspace
from turnwise_workspaces.workspace import Command

_LONGEST_S: Final = 7 * 86400.0
"""The end of the episode cancels a program earlier."""
_NOT_STARTED: Final = (126, 127)
_FIND: Final = 'command -v "$1" > /dev/null'


@define(eq=False)
class WorkspaceProgram:
    """
    A program to run in a workspace.

    Attributes:
        workspace: that it runs in.
        command: program and arguments; a name without a slash is searched in the PATH of the workspace.
        environment: more variables than the workspace has.
        take_line: called with each line of its standard output.
    """

    workspace: OwnedWorkspace
    command: Sequence[str]
    environment: Mapping[str, str]
    take_line: Callable[[str], None]
    _tail: deque[str] = field(factory=lambda: deque(maxlen=MAX_TAIL), init=False)
    _failure: Exception | None = field(default=None, init=False)

    async def run(self, on_end: Callable[[], object], *, has_called: Callable[[], bool]) -> None:
        """
        Run the program to its end, and then kill all processes of the workspace.

        Args:
            on_end: called as soon as the program has ended.
            has_called: whether it has called the model, so that it was started.

        Raises:
            ProgramFailedError: it ended with another exit code than 0.
            InfrastructureError: the workspace is lost, or has no such program.
            Exception: `take_line` raised it first.
        """
        lines = {"out": Lines(self._take_output), "err": Lines(self._tail.append)}
        command = Command(argv=self.command, environment=self.environment, timeout_s=_LONGEST_S)

        def take(stream: Literal["out", "err"], piece: bytes) -> None:
            try:
                lines[stream].feed(piece)
            except Exception as error:  # noqa: BLE001 - raised after the program; the workspace is well
                self._failure = self._failure or error

        try:
            result = await self.workspace.run(command, take)
        finally:
            on_end()
            await self.workspace.end_processes()
        for each in lines.values():
            each.end()
        if self._failure is not None:
            raise self._failure
        if result.exit_code in _NOT_STARTED and not has_called():
            await self._check_program()
        if result.exit_code != 0:
            passed = f"the workspace passed its limit of {result.limit}" if result.limit else ""
            tail = [*self._tail, *filter(None, [passed])]
            raise ProgramFailedError(describe_end(-9 if result.exit_code is None else result.exit_code, tail))

    async def _check_program(self) -> None:
        """Raise `InfrastructureError` if the workspace lacks the program: the model has done nothing yet."""
        found = await self.workspace.exec(Command(argv=("/bin/sh", "-c", _FIND, "sh", self.command[0])))
        if found.exit_code != 0:
            raise InfrastructureError(f"cannot start {self.command[0]!r}: the workspace has no such program")

    def _take_output(self, line: str) -> None:
        structlog.get_logger().debug("program output", line=line)
        self.take_line(line)
