"""The program of an agent: a separate process group, which ends with the episode, or with the worker."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import structlog
from attrs import define, field

from turnwise.errors import InfrastructureError
from turnwise_gateway.programs.keeper import KEEPER
from turnwise_gateway.programs.lines import Lines
from turnwise_gateway.programs.orphans import VARIABLE

INHERITED: Final = frozenset(
    {"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TEMP", "TERM", "TMP", "TMPDIR", "TZ", "USER"}
    | {"LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"}
    | {"ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "all_proxy", "https_proxy", "http_proxy", "no_proxy"}
    | {"CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE"}
)
"""Variables of the worker that a program gets, besides all with the prefix `LC_`."""
MAX_TAIL: Final = 20
"""Last lines of standard error that are kept."""
_CHUNK: Final = 1 << 16
_PIPE_S: Final = 1.0
"""Time for the output of an ended program; a process that left the group may hold its pipes for ever."""


class ProgramFailedError(Exception):
    """The program of an agent ended with another exit code than 0, or never called the model."""


@define(eq=False)
class Program:
    """
    A running program.

    Attributes:
        process: of the program; it leads its process group.
        output: descriptor of the end of a pipe that has its standard output.
        errors: the same for its standard error.
        lifeline: descriptor that the system closes when this process dies, which kills the program.
        take_line: called with each line of its standard output.
        mark: in the environment of all of its processes.
    """

    process: asyncio.subprocess.Process
    output: int
    errors: int
    lifeline: int
    take_line: Callable[[str], None]
    mark: str
    _tail: deque[str] = field(factory=lambda: deque(maxlen=MAX_TAIL), init=False)

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], take_line: Callable[[str], None], mark: str
    ) -> Program:
        """
        Start a program with no input and with these variables.

        Raises:
            InfrastructureError: the machine cannot start it, for example because the file does not exist.
        """
        # Pipes of our own: with those of asyncio, `wait` returns only when the children have closed them too.
        (output, stdout), (errors, stderr), (held, lifeline) = os.pipe(), os.pipe(), os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**environment, VARIABLE: mark},
                start_new_session=True,
                pass_fds=[held],
            )
            _kill_with_worker(held, process.pid)
        except OSError as error:
            for descriptor in (output, errors, lifeline):
                os.close(descriptor)
            raise InfrastructureError(f"cannot start {command[0]!r}: {error}") from error
        finally:
            for descriptor in (stdout, stderr, held):
                os.close(descriptor)
        return cls(process, output, errors, lifeline, take_line, mark)

    async def wait(self, on_end: Callable[[], object] = lambda: None) -> int:
        """
        Return the exit code, when the program has ended, its output is read, and its children have been killed.

        Args:
            on_end: called as soon as the program has ended.
        """
        async with asyncio.TaskGroup() as group:
            readers = [
                group.create_task(_read_lines(self.output, self._take_output)),
                group.create_task(_read_lines(self.errors, self._tail.append)),
            ]
            try:
                code = await self.process.wait()
            finally:
                self.kill()  # its children too: they would keep the pipes open
                on_end()
                os.close(self.lifeline)
                await self.process.wait()  # after a cancellation: the process must not stay a zombie
                await KEEPER.sweep(self.mark)  # children that have left the group
            await asyncio.wait(readers, timeout=_PIPE_S)
            for reader in readers:
                reader.cancel()
        return code

    def kill(self) -> None:
        """Kill the program and all processes of its group; a group that has ended is left alone."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS says the second of a group of zombies
            return

    def describe_end(self, code: int) -> str:
        """Return how the program ended, with its last lines of standard error."""
        return describe_end(code, self._tail)

    def _take_output(self, line: str) -> None:
        structlog.get_logger().debug("program output", pid=self.process.pid, line=line)
        self.take_line(line)


def describe_end(code: int, tail: Iterable[str]) -> str:
    """Return how a program ended, with its last lines of standard error."""
    ended = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return "\n".join((f"the program {ended}", *tail))


def inherited(names: Collection[str] | Literal["all"]) -> dict[str, str]:
    """
    Return the variables of this process that a program gets.

    The model under training steers the program, so what it can read may end in the model's context and in the files of
    the run: it gets what programs need to run, and not the secrets of the trainer.

    Args:
        names: of further variables; `all` for every one.
    """
    if names == "all":
        return dict(os.environ)
    kept = {*INHERITED, *names}
    return {name: value for name, value in os.environ.items() if name in kept or name.startswith("LC_")}


def _kill_with_worker(held: int, group: int) -> None:
    """
    Let the system kill a process group when this process dies, however it dies.

    The program has the read end of a pipe whose write end is here. When that closes, the group gets SIGKILL.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux; elsewhere a program outlives a worker that was killed
        fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(held, fcntl.F_SETOWN, -group)
        fcntl.fcntl(held, fcntl.F_SETFL, fcntl.fcntl(held, fcntl.F_GETFL) | os.O_ASYNC)


async def _read_lines(descriptor: int, take: Callable[[str], None]) -> None:
    """Hand over each line of a pipe, and close it at its end; a long line is cut."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        lines = Lines(take)
        while chunk := await stream.read(_CHUNK):
            lines.feed(chunk)
        lines.end()
    finally:
        transport.close()
