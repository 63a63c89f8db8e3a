"""Confines a fork before it runs model code: workspace, rlimits, Landlock, seccomp. All steps are irreversible."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from turnwise_python_sandbox.box import kernel, landlock, seccomp
from turnwise_python_sandbox.box.isolation import Workspace
from turnwise_python_sandbox.box.messages import Launch

_STACK_BYTES: Final = 64 * 2**20
_MAX_OPEN_FILES: Final = 64
"""Each open file holds memory of the kernel, a socket up to 208 KiB, which no other limit counts."""
_MAX_PENDING_SIGNALS: Final = 64
_HIGHEST_DESCRIPTOR: Final = 2**20
_LARGEST_ADDRESS_SPACE: Final = 2**47
_RESOLUTION_BYTES: Final = 2**20


class Confinement(NamedTuple):
    """
    The part of the confinement that is the same for every program of a server.

    Attributes:
        ruleset: files that programs may read and devices that they may use; None without Landlock, in tier 1 only.
        seccomp_filter: see `seccomp.assemble_filter`.
        max_threads: limit for all programs of the server together, because the kernel counts by user; 0 for none.
        address_space: bytes that the interpreter has mapped before the program.
        inherited_fds: descriptors that imports read through.
        protection: what protects the files of others.
    """

    ruleset: landlock.Ruleset | None
    seccomp_filter: bytes
    max_threads: int
    address_space: int
    inherited_fds: Sequence[int]
    protection: seccomp.FileProtection

    def apply(self, workspace: Workspace, launch: Launch) -> None:
        """Confine this process; after any error the program must not run."""
        # The order matters: each step needs calls or privileges that the later ones take away.
        os.setsid()
        workspace.enter()
        os.chdir(workspace.path)
        self._set_limits(launch)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.ruleset:
            self.ruleset.restrict_self(landlock.open_path_rules([workspace.path], writable=True))
        seccomp.install(self.seccomp_filter)

    def leave_descriptors(self, kept: Iterable[int]) -> None:
        """Close all descriptors but the streams, the inherited and the kept ones, then limit their number."""
        # The limit comes after the steps that open files: a busy server has more descriptors than a program may have.
        close_descriptors_except([*self.inherited_fds, *kept])
        set_limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)

    def _set_limits(self, launch: Launch) -> None:
        limits = {
            resource.RLIMIT_AS: self.address_space + launch.memory_bytes,
            resource.RLIMIT_FSIZE: launch.disk_bytes,
            resource.RLIMIT_STACK: _STACK_BYTES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_SIGPENDING: _MAX_PENDING_SIGNALS,
        }
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        if (max_threads := compute_max_threads(self.max_threads, hard)) is not None:
            limits[resource.RLIMIT_NPROC] = max_threads
        for kind, value in limits.items():
            set_limit(kind, value)
        # At the soft limit the kernel sends SIGXCPU, which tells the cause; at the hard one it kills programs that
        # ignore that signal.
        set_limit(resource.RLIMIT_CPU, launch.cpu_s, launch.cpu_s + 1)


def compute_max_threads(wanted: int, hard: int) -> int | None:
    """
    Return the limit for the threads of a program, which the kernel compares with all threads of the user.

    It leaves an eighth of the hard limit to the server, which could not fork another program otherwise.

    Args:
        wanted: limit for the programs of a server together; 0 for none.
        hard: present hard limit.
    """
    if hard == resource.RLIM_INFINITY:
        return wanted or None
    return min(wanted or hard, hard - hard // 8)


def set_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, never above the present hard limit; `hard` defaults to `soft`."""
    hard = soft if hard is None else hard
    _, present = resource.getrlimit(kind)
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    resource.setrlimit(kind, (soft, hard))


def close_descriptors_except(kept: Iterable[int]) -> None:
    """Close every descriptor above 2 that is not listed."""
    first = 3
    for fd in sorted(fd for fd in set(kept) if fd >= first):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, _HIGHEST_DESCRIPTOR)


def measure_address_space() -> int:
    """
    Return the address space of this process, bytes, rounded up to a MiB.

    The box has no /proc to read it from, so this searches for the lowest limit under which one more page can be mapped.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, _LARGEST_ADDRESS_SPACE
    try:
        while high - low > _RESOLUTION_BYTES:
            middle = (low + high) // 2
            if _can_map_under(middle, before[1]):
                high = middle
            else:
                low = middle
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return high


def _can_map_under(limit: int, hard: int) -> bool:
    if hard != resource.RLIM_INFINITY and limit > hard:
        return True
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        mmap.mmap(-1, mmap.PAGESIZE).close()
    except (OSError, MemoryError):
        return False
    return True
