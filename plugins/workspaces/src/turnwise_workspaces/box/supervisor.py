"""
The first process of a box: runs commands that it reads from its standard input, and kills what they leave.

As process 1 of its namespace no process of the agent can end it, because the kernel drops their signals. It
cannot be traced, and its descriptors cannot be opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import time
from typing import Any

from turnwise_workspaces.box.archive import use_archive
from turnwise_workspaces.box.files import use_file
from turnwise_workspaces.box.messages import Decoder, encode
from turnwise_workspaces.box.processes import hide, kill_all, kill_tree, memory_of, other_pids, signal_all

WATCH_S = 0.1
"""Seconds between two measurements of memory and processes."""
_CHUNK = 2**16
_BACKLOG = 128
_CANNOT_START = 126
_NOT_FOUND = 127
_MAX_PIPE_BYTES = 2**20
"""Most bytes that a pipe can hold; so much of a command's output may be unread at its end."""


class Job:
    """A command or a use of a file: one child process with its streams."""

    def __init__(self, number: int, header: dict[str, Any], payload: bytes) -> None:
        self.number = number
        self.started = time.monotonic()
        self.deadline = self.started + header["timeout_s"]
        self.room = header["max_output_bytes"]
        self.stdin = memoryview(payload)
        self.input: int | None = None
        self.outputs: dict[int, str] = {}  # by descriptor
        self.pid = 0
        self.exit_code: int | None = None
        self.has_ended = False
        self.timed_out = self.truncated = self.cancelled = False
        self.limit = ""
        self.snapshot: int | None = header["snapshot"] if header["do"] == "snapshot" else None


class Supervisor:
    """
    Serves one box.

    Args:
        settings: `folder`, `writable` with all folders that the agent can write, `environment`, `memory_bytes`,
            `processes` and `door`, the descriptor of a socket.
        control: descriptors of the requests and of the replies.
    """

    def __init__(self, settings: dict[str, Any], control: tuple[int, int]) -> None:
        self.settings = settings
        self.requests, self.replies = control
        self.jobs: dict[int, Job] = {}
        self.left: list[int] = []  # outputs that processes in the background still hold
        self.snapshots: dict[int, int] = {}  # descriptors of files in memory, which end with this process
        self.decoder = Decoder()
        self.next_watch = 0.0
        self.wakeup, self.signalled = os.pipe()
        for each in (self.wakeup, self.signalled):
            os.set_blocking(each, False)

    def serve(self) -> None:
        """Serve requests until the other end closes; the end of this process ends all others of the box."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.signalled, warn_on_full_buffer=False)
        self.send({"ready": True})
        while True:
            readable, writable = self.wait()
            if self.requests in readable and not self.take_requests():
                return
            self.move_bytes(readable, writable)
            self.reap()
            self.watch()
            for job in list(self.jobs.values()):
                self.advance(job)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        data = memoryview(encode(header, payload))
        while data:
            data = data[os.write(self.replies, data) :]

    def wait(self) -> tuple[list[int], list[int]]:
        outputs = [fd for job in self.jobs.values() for fd in job.outputs]
        inputs = [job.input for job in self.jobs.values() if job.input is not None]
        times = [job.deadline for job in self.jobs.values() if not job.timed_out]
        times += [self.next_watch] if self.next_watch else []
        poll = select.poll()
        for fd in [self.requests, self.wakeup, *outputs, *self.left]:
            poll.register(fd, select.POLLIN)
        for fd in inputs:
            poll.register(fd, select.POLLOUT)
        timeout = None if not times else max(0.0, min(times) - time.monotonic()) * 1000 + 1
        ready = [fd for fd, _ in poll.poll(timeout)]
        if self.wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wakeup, _CHUNK)
        return [fd for fd in ready if fd not in inputs], [fd for fd in ready if fd in inputs]

    def take_requests(self) -> bool:
        data = os.read(self.requests, _CHUNK)
        for header, payload in self.decoder.feed(data):
            self.take(header, payload)
        return bool(data)

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        number, what = header["id"], header["do"]
        if what == "cancel":
            if number in self.jobs:
                self.jobs[number].cancelled = True
        elif what == "end_processes":
            kill_all()
            self.send({"id": number, "done": True})
        elif what == "listen":
            self.listen()
            self.send({"id": number, "done": True})
        elif what == "drop":
            self.drop(header["snapshot"])
            self.send({"id": number, "done": True})
        else:
            if what == "restore":
                kill_all()
            job = Job(number, header, payload if what == "exec" else b"")
            self.jobs[number] = job
            try:
                self.start(job, header, payload)
            except OSError as error:  # no process or descriptor is left for it
                self.finish(job, _CANNOT_START, f"cannot start a process: {error.strerror}\n".encode())
        self.next_watch = self.next_watch or time.monotonic() + WATCH_S

    def listen(self) -> None:
        """Hand the host a socket that listens here: it stays in the network of the box, whatever process has it."""
        with socket.socket(fileno=os.dup(self.settings["door"])) as door, socket.socket() as made:
            made.bind(("127.0.0.1", 0))
            made.listen(_BACKLOG)
            socket.send_fds(door, [b"."], [made.fileno()])

    def drop(self, snapshot: int) -> None:
        """Remove a snapshot, if there is one: a file for it may have been one too many."""
        if (fd := self.snapshots.pop(snapshot, None)) is not None:
            os.close(fd)

    # Processes

    def start(self, job: Job, header: dict[str, Any], payload: bytes) -> None:
        if job.snapshot is not None:
            self.snapshots[job.snapshot] = os.memfd_create("snapshot", os.MFD_CLOEXEC)
            signal_all(signal.SIGSTOP)  # so that what is copied is the state of one moment
        stdin, job.input = os.pipe()
        out, stdout = os.pipe()
        err, stderr = os.pipe() if header.get("separate") else (-1, stdout)
        try:
            job.pid = os.fork()
            if not job.pid:
                self.be_child(header, payload, (stdin, stdout, stderr))
        finally:
            for fd in {stdin, stdout, stderr}:
                os.close(fd)
            job.outputs = {out: "out"} if err < 0 else {out: "out", err: "err"}
            for fd in (job.input, *job.outputs):
                os.set_blocking(fd, False)
            if not job.stdin:
                self.close_input(job)

    def be_child(self, header: dict[str, Any], payload: bytes, streams: tuple[int, int, int]) -> None:
        code = _CANNOT_START
        try:
            os.setsid()
            for target, fd in enumerate(streams):
                os.dup2(fd, target)
            kept = 3
            if "snapshot" in header:
                os.dup2(self.snapshots[header["snapshot"]], kept)
                kept += 1
            os.closerange(kept, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            self.lower_limits()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            if "snapshot" in header:
                code = use_archive(header, self.settings["writable"], 3)
                return  # `finally` ends this process
            os.chdir(self.settings["folder"])
            if header["do"] == "exec":
                argv = header["argv"]
                os.execvpe(argv[0], argv, {**self.settings["environment"], **header["environment"]})
            code = use_file(header, payload)
        except FileNotFoundError as error:
            code = _NOT_FOUND
            os.write(2, f"{header.get('argv', [''])[0]}: {error.strerror}\n".encode(errors="replace"))
        except BaseException as error:  # noqa: BLE001 - it must not become a second supervisor
            text = getattr(error, "strerror", None) or error
            os.write(2, f"{header.get('argv', [''])[0]}: {text}\n".encode(errors="replace"))
        finally:
            os._exit(code)

    def lower_limits(self) -> None:
        memory, processes = self.settings["memory_bytes"], self.settings["processes"]
        for what, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_DATA, memory),
            (resource.RLIMIT_NPROC, processes),
        ):
            hard = resource.getrlimit(what)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(what, (value, value))

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for job in self.jobs.values():
                if job.pid == pid:
                    job.exit_code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                    job.has_ended = True

    def watch(self) -> None:
        """End all processes when together they pass a limit; nothing is measured while there are none."""
        now = time.monotonic()
        if not self.next_watch or now < self.next_watch:
            return
        pids = other_pids()
        self.next_watch = now + WATCH_S if pids or self.jobs else 0.0
        # The kernel's own limit stops new processes where it counts them by box; this one holds everywhere.
        passed = "processes" if len(pids) > self.settings["processes"] else ""
        passed = "memory" if memory_of(pids) > self.settings["memory_bytes"] else passed
        if passed:
            for job in self.jobs.values():
                job.limit = job.limit or passed
            kill_all()

    # Streams

    def move_bytes(self, readable: list[int], writable: list[int]) -> None:
        for job in list(self.jobs.values()):
            if job.input in writable:
                self.write_input(job)
            for fd in [each for each in job.outputs if each in readable]:
                self.read_output(job, fd)
        for fd in [each for each in self.left if each in readable]:
            if read_some(fd) == b"":
                self.left.remove(fd)
                os.close(fd)

    def write_input(self, job: Job) -> None:
        try:
            job.stdin = job.stdin[os.write(job.input or 0, job.stdin[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the command does not read it
            job.stdin = job.stdin[:0]
        if not job.stdin:
            self.close_input(job)

    def close_input(self, job: Job) -> None:
        if job.input is not None:
            os.close(job.input)
            job.input = None

    def read_output(self, job: Job, fd: int) -> int:
        """Pass on what there is, and return the number of bytes that were read."""
        data = read_some(fd)
        if data == b"":
            del job.outputs[fd]
            os.close(fd)
        if not data:
            return 0
        kept = data[: job.room]
        job.room -= len(kept)
        job.truncated = job.truncated or len(kept) < len(data)
        if kept:
            self.send({"id": job.number, "stream": job.outputs[fd]}, kept)
        return len(data)

    # Ends

    def advance(self, job: Job) -> None:
        """Kill a job whose time is over, and report one that has ended."""
        if not job.has_ended and (job.cancelled or time.monotonic() >= job.deadline):
            job.timed_out = True
            kill_tree(job.pid)
            self.reap()
        if not job.has_ended:
            return
        # Processes in the background may hold the output open; what was written before the end is in the pipe already.
        for fd in list(job.outputs):
            left = _MAX_PIPE_BYTES
            while left > 0 and (count := self.read_output(job, fd)):
                left -= count
        self.finish(job, job.exit_code)

    def finish(self, job: Job, exit_code: int | None, text: bytes = b"") -> None:
        del self.jobs[job.number]
        if job.snapshot is not None:
            signal_all(signal.SIGCONT)
            if job.timed_out or exit_code != 0:
                self.drop(job.snapshot)
        self.close_input(job)
        self.left += job.outputs
        if text:
            self.send({"id": job.number, "stream": "out"}, text)
        self.send(
            {
                "id": job.number,
                "done": True,
                "exit_code": None if job.timed_out else exit_code,
                "timed_out": job.timed_out,
                "truncated": job.truncated,
                "limit": job.limit,
                "wall_s": time.monotonic() - job.started,
            }
        )


def read_some(fd: int) -> bytes | None:
    """Return bytes of a pipe; None when it has none now, empty at its end."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None


def read_line(fd: int) -> bytes:
    """Return a line, and read nothing behind it."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(fd, 1)):
        line += byte
    return bytes(line)


def main() -> None:
    """Serve, with the settings that come as the first line of the standard input."""
    settings = json.loads(read_line(0))
    os.makedirs(settings["environment"]["HOME"], exist_ok=True)
    os.umask(0o022)
    control = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    hide()
    Supervisor(settings, control).serve()
