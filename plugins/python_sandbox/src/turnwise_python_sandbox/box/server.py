"""
The fork server: a warm interpreter that never runs model code itself, and watches the forks that do.

It takes `messages` on one socket and answers on the same. It ends, with everything under it, when that socket does.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
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
from typing import Any, Final, NoReturn

from turnwise_python_sandbox.box import confinement, exercises, isolation, kernel, landlock, messages, program, seccomp
from turnwise_python_sandbox.box.confinement import Confinement
from turnwise_python_sandbox.box.isolation import Isolation, Place
from turnwise_python_sandbox.box.messages import Began, Ended, Launch, Ready, Signal

_COMMON: Final = (
    "abc array bisect cmath collections copy datetime decimal enum fractions functools heapq io itertools json "
    "linecache math operator os random re statistics string struct sys textwrap threading time traceback typing"
)
"""What nearly every program imports; more would cost each of them more than it saves the few."""
_DISK_POLL_S: Final = 0.1
_NUM_FILES: Final = 4
"""Beside a launch: code, standard input, output, errors."""


class _Running:
    """One program: its launch, its process and its place."""

    def __init__(self, launch: Launch, place: Place, pid: int) -> None:
        self.launch = launch
        self.place = place
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.began_at = time.monotonic()
        self.cause = ""

    @property
    def deadline(self) -> float:
        return self.began_at + self.launch.wall_s

    def kill(self, cause: str) -> None:
        self.cause = self.cause or cause
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> tuple[Ended, int | None]:
        """Wait for the process, take away what it left, and say how it went; see also `Place.remove`."""
        _, wait_status, used = os.wait4(self.pid, 0)
        wall_s = time.monotonic() - self.began_at
        disk_full = self.place.disk_full()
        cleaner = self.place.remove()
        os.close(self.pidfd)
        cpu_s = used.ru_utime + used.ru_stime
        return Ended(self.launch.job, wait_status, self.cause, disk_full, wall_s, cpu_s, used.ru_maxrss, ""), cleaner


class ForkServer:
    """
    Forks a confined program per launch, and kills it when its time or its disk is used up.

    Args:
        control: datagram socket to the supervisor.
        places: where programs live.
        limits: what they may do.
    """

    def __init__(self, control: socket.socket, places: Isolation, limits: Confinement) -> None:
        self._control = control
        self._places = places
        self._limits = limits
        self._running: dict[int, _Running] = {}
        self._cleaners: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._next_disk_poll = 0.0
        # Listed before the forks: looking at every module's name would copy a page for each.
        self._own_modules = [name for name in sys.modules if name.startswith("turnwise_python_sandbox")]

    def serve(self) -> None:
        """Work until the supervisor closes its end."""
        try:
            while self._turn():
                pass
        finally:
            for each in self._running.values():
                each.kill("asked")
                _, cleaner = each.reap()
                if cleaner:
                    os.waitpid(cleaner, 0)
            for cleaner in self._cleaners.values():
                os.waitpid(cleaner, 0)
            self._places.close()

    def _turn(self) -> bool:
        for fd, _ in self._poll.poll(self._patience_ms()):
            if fd != self._control.fileno():
                self._reap(fd)
            elif not self._receive():
                return False
        self._enforce(time.monotonic())
        return True

    def _patience_ms(self) -> float | None:
        if not self._running:
            return None
        # One that is being killed has no deadline: waiting for it must not spin.
        deadlines = (each.deadline for each in self._running.values() if not each.cause)
        patience_s = min(deadlines, default=math.inf) - time.monotonic()
        return max(0.0, min(patience_s, _DISK_POLL_S)) * 1000

    def _enforce(self, now: float) -> None:
        poll_disk = now >= self._next_disk_poll
        if poll_disk:
            self._next_disk_poll = now + _DISK_POLL_S
        for each in self._running.values():
            if each.cause:
                continue
            if now >= each.deadline:
                each.kill("wall")
            elif poll_disk and each.place.over_quota(each.pid):
                each.kill("disk")

    def _receive(self) -> bool:
        data, ancillary, _flags, _address = self._control.recvmsg(messages.MAX_BYTES, socket.CMSG_SPACE(_NUM_FILES * 4))
        files = _files(ancillary)
        try:
            message = messages.decode(data) if data else None
            if isinstance(message, Launch) and len(files) == _NUM_FILES:
                self._launch(message, files)
            elif isinstance(message, Signal):
                self._signal(message)
        finally:
            for fd in files:
                os.close(fd)
        return bool(data)

    def _signal(self, message: Signal) -> None:
        for each in self._running.values():
            if each.launch.job == message.job:
                each.cause = each.cause or ("asked" if message.number == signal.SIGKILL else "")
                each.signal(message.number)

    def _launch(self, launch: Launch, files: Sequence[int]) -> None:
        try:
            place = self._places.place(launch)
            try:
                pid = os.fork()
                if pid == 0:
                    self._become(launch, place, files)
            finally:
                place.leave()
        except OSError as error:
            self._send(Ended(launch.job, -1, "", False, 0.0, 0.0, 0, str(error)))
            return
        running = _Running(launch, place, pid)
        self._running[running.pidfd] = running
        self._poll.register(running.pidfd, select.POLLIN)

    def _become(self, launch: Launch, place: Place, files: Sequence[int]) -> NoReturn:
        """Be the program, in the fork: nothing may return into the server's own frames."""
        try:
            code, *standard = files
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
            self._limits.enter(place, launch)
            self._control.send(messages.encode(Began(launch.job)))
            confinement.close_all_but([*self._limits.keep, code])
            _settle(place.path, self._own_modules)
            (program.run_session if launch.session else program.run_file)(code)
        except BaseException:  # noqa: BLE001 - the supervisor shows it: no program began
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
        ended, cleaner = self._running.pop(pidfd).reap()
        self._send(ended)
        if cleaner:
            watch = os.pidfd_open(cleaner)
            self._cleaners[watch] = cleaner
            self._poll.register(watch, select.POLLIN)

    def _send(self, message: messages.Message) -> None:
        self._control.send(messages.encode(message))


def _files(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def _settle(path: str, own_modules: Sequence[str]) -> None:
    """Make the interpreter look as if it had just started in this directory."""
    os.environ.update(HOME=path, TMPDIR=path)
    sys.path.insert(0, path)
    sys.orig_argv[1:] = []
    for name in own_modules:
        del sys.modules[name]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Python's own generator seeds itself after a fork; numpy's would repeat one sequence in every program.
        numpy_random.seed()
    gc.enable()


def _preload(names: Sequence[str]) -> tuple[str, ...]:
    missing = []
    for name in names:
        try:
            exercises.warm_up(name)
        except Exception as error:  # noqa: BLE001 - a package may raise anything as it is imported
            missing.append(f"{name}: {error}")
    return tuple(missing)


def _confinement(settings: dict[str, Any], version: int) -> Confinement:
    readable = isolation.open_grants(settings["readable"], writable=False)
    devices = isolation.open_grants(settings["devices"], writable=True)
    return Confinement(
        files=landlock.Ruleset((*readable, *devices), version) if version else None,
        filter=seccomp.prepared(),
        max_threads=settings["max_threads"],
        address_space=confinement.address_space(),
        keep=settings["keep"],
    )


def main(settings_text: str) -> None:
    """
    Serve, with settings as JSON.

    Keys: ``control`` (descriptor), ``namespaces`` (tier 1 or 2), ``place``, ``readable``, ``devices``, ``keep``,
    ``path`` (for imports), ``preload``, ``max_threads``.
    """
    settings = json.loads(settings_text)
    control = socket.socket(fileno=settings["control"])
    # A shell that starts things in the background has them ignore this one, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if not settings["namespaces"]:
        # Keeps programs of the same user out of this process; in tier 1 they cannot name it, and setns needs it on.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.be_first_to_die()
    version = landlock.abi()
    if not version and not settings["namespaces"]:
        sys.exit("this kernel has no Landlock, or the container hides it")
    sys.path += settings["path"]
    missing = _preload([*_COMMON.split(), *settings["preload"]])
    sys.stdout.reconfigure(encoding="utf-8", errors="strict", line_buffering=True)  # type: ignore[union-attr]
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    places = (isolation.NamespaceIsolation if settings["namespaces"] else isolation.PlainIsolation)(settings["place"])
    server = ForkServer(control, places, _confinement(settings, version))
    control.send(messages.encode(Ready(version, missing)))
    gc.collect()
    gc.freeze()
    gc.disable()
    server.serve()
