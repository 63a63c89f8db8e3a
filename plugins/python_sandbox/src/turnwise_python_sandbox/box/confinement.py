"""What a fork does to itself, in this order, before it runs a line of model code. None of it can be undone."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from turnwise_python_sandbox.box import kernel, landlock, seccomp
from turnwise_python_sandbox.box.isolation import Place, open_grants
from turnwise_python_sandbox.box.messages import Launch

_STACK_BYTES: Final = 64 * 2**20
_OPEN_FILES: Final = 256
_HIGHEST_DESCRIPTOR: Final = 2**20
_LARGEST_ADDRESS_SPACE: Final = 2**47
_STEP_BYTES: Final = 2**20


class Confinement(NamedTuple):
    """
    What is the same for every program of a server.

    Attributes:
        files: that it may read, and devices that it may use; None without Landlock, which only tier 1 accepts.
        filter: of system calls, see `seccomp.prepared`.
        max_threads: of all programs of this server together; the kernel counts by user.
        address_space: bytes that the interpreter takes before the program.
        keep: descriptors that imports go through.
    """

    files: landlock.Ruleset | None
    filter: bytes
    max_threads: int
    address_space: int
    keep: Sequence[int]

    def enter(self, place: Place, launch: Launch) -> None:
        """Confine this process; every error means that the program must not run."""
        os.setsid()
        place.enter()
        os.chdir(place.path)
        self._set_limits(launch)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.files:
            self.files.restrict(open_grants([place.path], writable=True))
        seccomp.install(self.filter)

    def _set_limits(self, launch: Launch) -> None:
        limits = {
            resource.RLIMIT_AS: self.address_space + launch.memory_bytes,
            resource.RLIMIT_FSIZE: launch.disk_bytes,
            resource.RLIMIT_STACK: _STACK_BYTES,
            resource.RLIMIT_NOFILE: _OPEN_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if self.max_threads:
            limits[resource.RLIMIT_NPROC] = self.max_threads
        for kind, value in limits.items():
            set_limit(kind, value)
        # The first limit ends it by SIGXCPU, which says why; the second is for programs that ignore that.
        set_limit(resource.RLIMIT_CPU, launch.cpu_s, launch.cpu_s + 1)


def set_limit(kind: int, value: int, most: int | None = None) -> None:
    """Set a limit for good, or leave the stricter one that the surroundings set; `most` is the hard one."""
    most = value if most is None else most
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value, most = min(value, hard), min(most, hard)
    resource.setrlimit(kind, (value, most))


def close_all_but(keep: Iterable[int]) -> None:
    """Close every descriptor from 3 on that is not listed."""
    first = 3
    for fd in sorted(fd for fd in set(keep) if fd >= first):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, _HIGHEST_DESCRIPTOR)


def address_space() -> int:
    """
    Return this process's address space, bytes, to the next MiB.

    Found by asking for one more page under ever closer limits, since the box has no /proc to read it from.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, _LARGEST_ADDRESS_SPACE
    try:
        while high - low > _STEP_BYTES:
            middle = (low + high) // 2
            if _fits(middle, before[1]):
                high = middle
            else:
                low = middle
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return high


def _fits(limit: int, hard: int) -> bool:
    if hard != resource.RLIM_INFINITY and limit > hard:
        return True
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        mmap.mmap(-1, mmap.PAGESIZE).close()
    except (OSError, MemoryError):
        return False
    return True
