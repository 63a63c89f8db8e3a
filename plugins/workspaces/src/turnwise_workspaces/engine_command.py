"""Runs the command line of a container engine, with bounded output and a deadline."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import IO, Final

import structlog
from attrs import define, field

from turnwise.errors import InfrastructureError
from turnwise_workspaces.workspace import OnStream

_CHUNK: Final = 2**16
_LISTEN: Final = """
import socket
made = socket.create_server(("127.0.0.1", 0), backlog=128)
socket.send_fds(socket.socket(fileno=1), [b"."], [made.fileno()])
"""
_REMOVALS: Final = """
for s in 0 1 5; do sleep $s; "$@" >/dev/null 2>&1 && done=1; done
for s in 30 60 120; do [ "$done" ] && exit; sleep $s; "$@" >/dev/null 2>&1 && done=1; done
"""
"""An engine may finish what it began for a client that is gone, and it may be down, so one removal is not enough."""
_NS_GET_PARENT: Final = 0xB702
"""A request of `ioctl`; see ioctl_ns(2)."""
_KEPT_ERRORS: Final = 4096
_STARTS_OF_FAILURES: Final = ("Error: ", "Error response from daemon: ", "error during connect: ", "Cannot connect to ")
_CODES_OF_FAILURES: Final = (1, 125, 255)
_BY_RUNTIME: Final = "OCI runtime"
"""In the message of a process that cannot start, which a container at its limits causes, and so the agent."""


@define(eq=False)
class Collected:
    """
    The beginning of a program's output.

    Attributes:
        room: bytes that are kept of both streams together.
        on_output: called with each piece that is kept.
        stdout: of the program.
        stderr: of the program.
        truncated: there was more.
        failure: what `on_output` raised first.
        is_merged: the program's whole output comes as standard output, so that nobody but the engine itself writes
            to standard error.
        errors: the end of that.
    """

    room: int
    on_output: Callable[[bytes], None] | None = None
    stdout: bytearray = field(factory=bytearray)
    stderr: bytearray = field(factory=bytearray)
    truncated: bool = False
    failure: Exception | None = None
    is_merged: bool = False
    errors: bytes = b""

    async def read(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        """Read a stream to its end."""
        if self.is_merged and into is self.stderr:
            while data := await stream.read(_CHUNK):
                self.errors = (self.errors + data)[-_KEPT_ERRORS:]
            return
        while data := await stream.read(_CHUNK):
            kept = data[: self.room]
            self.room -= len(kept)
            self.truncated = self.truncated or len(kept) < len(data)
            into += kept
            if kept and self.on_output is not None and self.failure is None:
                try:
                    self.on_output(kept)
                except Exception as error:  # noqa: BLE001 - raised after the command
                    self.failure = error


@define(eq=False)
class PassedOn(Collected):
    """
    A program's output that is handed over, of which nothing is kept.

    Attributes:
        take: called with each piece.
    """

    room: int = field(default=0, init=False)
    take: OnStream = field(kw_only=True)

    async def read(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        while data := await stream.read(_CHUNK):
            self.take("out" if into is self.stdout else "err", data)


def find_loss(code: int | None, errors: bytes, mark: str) -> str:
    """
    Return why an engine has lost a command; empty if it has not.

    The monitor of a command may end, or the engine's service be started again, while the container runs on. A client
    then says so, or even returns 0, because the new service knows no exit code. The agent may write to the client, too,
    so its words count only without the end that the shell around the command says, and with an engine's exit code.

    Args:
        code: of the client; None for a command whose time ended.
        errors: what it wrote, with the line of the command's end.
        mark: first word of that line.
    """
    lines = errors.decode(errors="replace").splitlines()
    if any(line.startswith(mark) for line in lines):
        return ""
    if code in _CODES_OF_FAILURES:
        said = (line for line in lines if line.startswith(_STARTS_OF_FAILURES) and _BY_RUNTIME not in line)
        return next(said, "")
    return "its client ended before it" if code == 0 else ""


async def start_program(
    arguments: Sequence[str],
    *,
    with_input: bool,
    variables: Mapping[str, str] | None = None,
    source: IO[bytes] | None = None,
) -> asyncio.subprocess.Process:
    """
    Start a program, by default with the variables of this process; `InfrastructureError` when it cannot be.

    Its standard input is a file, or what `communicate` feeds, or empty.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *arguments,
            stdin=source or (subprocess.PIPE if with_input else subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            start_new_session=True,  # Ctrl-C is for this process, which ends its workspaces itself
        )
    except FileNotFoundError as error:
        raise InfrastructureError(f"{arguments[0]} is not installed") from error


async def communicate(process: asyncio.subprocess.Process, collected: Collected, data: bytes = b"") -> int:
    """Give a program its input, collect its output, and return its exit code; kill it when this is cancelled."""
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(collected.read(process.stdout, collected.stdout))
            group.create_task(collected.read(process.stderr, collected.stderr))
            if process.stdin is not None:
                group.create_task(_feed(process.stdin, data))
        return await process.wait()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise


async def ask_engine(arguments: Sequence[str], max_bytes: int = 2**20, *, log_warnings: bool = False) -> str:
    """
    Return what a command of the engine prints.

    Args:
        arguments: of the command, its program first.
        max_bytes: that are kept.
        log_warnings: log its standard error, once, although it succeeds: engines warn there of limits that they ignore.

    Raises:
        InfrastructureError: it fails; the text has its last line.
    """
    collected = Collected(max_bytes)
    code = await communicate(await start_program(arguments, with_input=False), collected)
    if code != 0:
        lines = collected.stderr.decode(errors="replace").strip().splitlines()
        raise InfrastructureError(f"{arguments[0]} failed: {lines[-1] if lines else f'exit code {code}'}")
    if log_warnings and (warning := " ".join(collected.stderr.decode(errors="replace").split())):
        _log_warning(arguments[0], warning)
    return collected.stdout.decode(errors="replace")


@lru_cache(64)  # each container of a run has the same
def _log_warning(engine: str, text: str) -> None:
    structlog.get_logger().warning("container engine warns", engine=engine, warning=text)


def remove_later(arguments: Sequence[str]) -> None:
    """Run a command that removes something several times, without waiting; it never raises."""
    try:
        subprocess.Popen(
            ["/bin/sh", "-c", _REMOVALS, "sh", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode = 0  # nobody waits for it: it may outlive this process
    except OSError:
        return


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        return  # the program does not read it


def pids_beside(init: int) -> list[int]:
    """
    Return the processes of this machine that are in the process namespace of another, but for that one.

    Those in namespaces below it count: a process can make one if its user may make namespaces of users.

    Raises:
        OSError: this process may not look, or there is no such process here.
    """
    wanted = os.stat(f"/proc/{init}/ns/pid").st_ino
    if wanted == os.stat("/proc/self/ns/pid").st_ino:
        raise ProcessLookupError(f"process {init} is in no namespace of its own")
    found, inside = [], {wanted: True, os.stat("/proc/self/ns/pid").st_ino: False}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != init:
            try:
                if _is_inside(f"/proc/{name}/ns/pid", inside):
                    found.append(int(name))
            except OSError:
                continue
    return found


def _is_inside(path: str, known: dict[int, bool]) -> bool:
    """Return whether a namespace is one of the known ones inside or below one, and note it."""
    namespace = os.stat(path).st_ino
    if namespace not in known:
        fd, passed = os.open(path, os.O_RDONLY | os.O_CLOEXEC), []
        try:
            while (number := os.fstat(fd).st_ino) not in known:
                passed.append(number)
                fd, child = fcntl.ioctl(fd, _NS_GET_PARENT), fd
                os.close(child)
            known.update(dict.fromkeys(passed, known[number]))
        except PermissionError:  # it is not below the namespace of this process
            known.update(dict.fromkeys(passed, False))
        finally:
            os.close(fd)
    return known[namespace]


async def listen_in_network(pid: int) -> socket.socket:
    """
    Return a socket that listens at 127.0.0.1 in the network of a process: it stays there, whatever process has it.

    Raises:
        InfrastructureError: this user may not enter that network, or the process is on another machine.
    """
    # A process of another user's engine belongs to another user namespace, which its owner enters first.
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    command = ["nsenter", "--target", str(pid), *user, "--net", "--", sys.executable, "-I", "-S", "-c", _LISTEN]
    ours, theirs = socket.socketpair()
    with ours:
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.DEVNULL,
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except FileNotFoundError as error:
            raise InfrastructureError(
                "nsenter is not installed (Debian, Ubuntu: apt-get install util-linux)"
            ) from error
        _, errors = await process.communicate()
        if process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise InfrastructureError(
                "this user cannot enter the network of the container, which a program inside needs:"
                f" {lines[-1] if lines else f'exit code {process.returncode}'}"
            )
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    return socket.socket(fileno=descriptors[0])


def now() -> float:
    """Return the time of a clock that only goes forward, in seconds."""
    return time.monotonic()
