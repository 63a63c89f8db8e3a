"""
The fork server: a warm interpreter that forks a confined program for each launch, and never runs model code itself.

It receives `messages` on one socket and replies on the same. When that socket closes, it kills its programs and exits.
"""

from __future__ import annotations

import array
import contextlib
import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Final, NoReturn

from turnwise_python_sandbox.box import descriptor_forms, messages, program
from turnwise_python_sandbox.box.confinement import Confinement
from turnwise_python_sandbox.box.isolation import Isolation, Workspace
from turnwise_python_sandbox.box.messages import Exited, Launch, Signal, Started

_DISK_POLL_S: Final = 0.1
_NUM_FILES: Final = 4
"""Files that come with a launch: code, standard input, standard output, standard error."""


class _RunningProgram:
    def __init__(self, launch: Launch, workspace: Workspace, pid: int) -> None:
        self.launch = launch
        self.workspace = workspace
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.started_at = time.monotonic()
        self.cause = ""
        """Why the server killed it, as in `Exited`; the first cause counts."""

    @property
    def deadline(self) -> float:
        return self.started_at + self.launch.wall_s

    def kill(self, cause: str) -> None:
        self.cause = self.cause or cause
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> tuple[Exited, int | None]:
        """Wait for the process and remove its files; return the message and the child of `Workspace.remove`."""
        _, wait_status, used = os.wait4(self.pid, 0)
        wall_s = time.monotonic() - self.started_at
        disk_full = self.workspace.is_full()
        cleaner = self.workspace.remove()
        os.close(self.pidfd)
        cpu_s = used.ru_utime + used.ru_stime
        job_id = self.launch.job_id
        return Exited(job_id, wait_status, self.cause, disk_full, wall_s, cpu_s, used.ru_maxrss, ""), cleaner


class ForkServer:
    """
    Forks a confined program per launch, and kills it at its time limit or disk limit.

    Args:
        control: datagram socket to the supervisor.
        isolation: creates the programs' workspaces.
        limits: the confinement of every program.
    """

    def __init__(self, control: socket.socket, isolation: Isolation, limits: Confinement) -> None:
        self._control = control
        self._isolation = isolation
        self._limits = limits
        self._running: dict[int, _RunningProgram] = {}
        """Programs by pidfd."""
        self._cleaners: dict[int, int] = {}
        """Process ids of children that remove files, by pidfd."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._next_disk_poll = 0.0
        # Listed before the forks, because a scan of all module names would copy a page for each in every fork.
        self._own_modules = [name for name in sys.modules if name.startswith("turnwise_python_sandbox")]

    def serve(self) -> None:
        """Handle messages until the supervisor closes its end."""
        try:
            while self._step():
                pass
        finally:
            for each in self._running.values():
                each.kill("asked")
                _, cleaner = each.reap()
                if cleaner:
                    os.waitpid(cleaner, 0)
            for cleaner in self._cleaners.values():
                os.waitpid(cleaner, 0)

    def _step(self) -> bool:
        """Wait for events and handle them; return False once the supervisor has closed its end."""
        for fd, _ in self._poll.poll(self._poll_timeout_ms()):
            if fd != self._control.fileno():
                self._reap(fd)
            elif not self._receive():
                return False
        self._enforce_limits(time.monotonic())
        return True

    def _poll_timeout_ms(self) -> float | None:
        if not self._running:
            return None
        # A program that is being killed has no deadline; with one, this would return 0 until the program is dead.
        deadlines = (each.deadline for each in self._running.values() if not each.cause)
        timeout_s = min(deadlines, default=math.inf) - time.monotonic()
        return max(0.0, min(timeout_s, _DISK_POLL_S)) * 1000

    def _enforce_limits(self, now: float) -> None:
        poll_disk = now >= self._next_disk_poll
        if poll_disk:
            self._next_disk_poll = now + _DISK_POLL_S
        for each in self._running.values():
            if each.cause:
                continue
            if now >= each.deadline:
                each.kill("wall")
            elif poll_disk and each.workspace.exceeds_quota(each.pid):
                each.kill("disk")

    def _receive(self) -> bool:
        space = socket.CMSG_SPACE(_NUM_FILES * 4)
        data, ancillary, _flags, _address = self._control.recvmsg(messages.MAX_DATAGRAM_BYTES, space)
        fds = _extract_descriptors(ancillary)
        try:
            message = messages.decode(data) if data else None
            if isinstance(message, Launch) and len(fds) == _NUM_FILES:
                self._launch(message, fds)
            elif isinstance(message, Signal):
                self._send_signal(message)
        finally:
            for fd in fds:
                os.close(fd)
        return bool(data)

    def _send_signal(self, message: Signal) -> None:
        for each in self._running.values():
            if each.launch.job_id == message.job_id:
                each.cause = each.cause or ("asked" if message.number == signal.SIGKILL else "")
                each.signal(message.number)

    def _launch(self, launch: Launch, fds: Sequence[int]) -> None:
        try:
            workspace = self._isolation.create_workspace(launch)
            try:
                pid = os.fork()
                if pid == 0:
                    self._become_program(launch, workspace, fds)
            finally:
                workspace.restore_server()
        except OSError as error:
            self._send(Exited(launch.job_id, -1, "", False, 0.0, 0.0, 0, str(error)))
            return
        running = _RunningProgram(launch, workspace, pid)
        self._running[running.pidfd] = running
        self._poll.register(running.pidfd, select.POLLIN)

    def _become_program(self, launch: Launch, workspace: Workspace, fds: Sequence[int]) -> NoReturn:
        """Run the program, in the fork; never return into the frames of the server."""
        try:
            code_fd, *standard = fds
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
            self._limits.apply(workspace, launch)
            self._limits.leave_descriptors([code_fd, self._control.fileno()])
            # Pages that the fork shares with the server count as its own, so the program's use begins here.
            self._send(Started(launch.job_id, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
            self._control.close()
            _reset_interpreter(workspace.path, self._own_modules)
            if not self._limits.protection.read_only_mounts:
                descriptor_forms.install(dedicated_user=self._limits.protection.dedicated_user)
            (program.run_session if launch.session else program.run_file)(code_fd)
        except BaseException:  # noqa: BLE001 - the supervisor reports it, because no `Started` was sent
            with contextlib.suppress(BaseException):
                os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        if pidfd in self._cleaners:
            os.waitpid(self._cleaners.pop(pidfd), 0)
            os.close(pidfd)
            return
        exited, cleaner = self._running.pop(pidfd).reap()
        self._send(exited)
        if cleaner:
            cleaner_fd = os.pidfd_open(cleaner)
            self._cleaners[cleaner_fd] = cleaner
            self._poll.register(cleaner_fd, select.POLLIN)

    def _send(self, message: messages.Message) -> None:
        self._control.send(messages.encode(message))


def _extract_descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def _reset_interpreter(path: str, own_modules: Sequence[str]) -> None:
    """Make the interpreter look as if it had just started in this directory."""
    os.environ.update(HOME=path, TMPDIR=path)
    sys.path.insert(0, path)
    sys.orig_argv[1:] = []
    for name in own_modules:
        del sys.modules[name]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Python reseeds its own generator after a fork; numpy's would repeat one sequence in every program.
        numpy_random.seed()
    gc.enable()
