"""System calls that Python 3.11 has no function for; each raises `OSError` with the kernel's error number."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWPID: Final = 0x20000000
MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REMOUNT: Final = 0x20
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18
_MS_RELATIME: Final = 1 << 21
_ST_RELATIME: Final = 1 << 12
_KEPT_MOUNT_FLAGS: Final = MS_NOSUID | MS_NODEV | MS_NOEXEC | 1 << 10 | 1 << 11
"""These flags, no access times, and no access times of directories; `statvfs` has them under the same numbers."""
PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITY_VERSION_3: Final = 0x20080522
_CLONE_VM: Final = 0x100
_SIGCHLD: Final = 17
_STACK_BYTES: Final = 16384

libc: Final = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    libc.clone.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def check_result(result: int, action: str) -> int:
    """Return a result that is not negative; otherwise raise the `OSError` of `errno`."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Make a system call; an int argument is passed as a C long."""
    values = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return check_result(libc.syscall(ctypes.c_long(number), *values), f"system call {number}")


def prctl(option: int, value: int = 0, pointer: int = 0) -> int:
    """Change an attribute of this process; `prctl(2)`."""
    return check_result(libc.prctl(option, value, pointer, 0, 0), f"prctl {option}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces; `unshare(2)`."""
    check_result(libc.unshare(flags), "unshare")


def enter_pid_namespace(pidfd: int) -> None:
    """Put later children of this process into the pid namespace of another process."""
    check_result(libc.setns(pidfd, CLONE_NEWPID), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system, or bind one; `mount(2)`."""
    names = (source.encode(), target.encode(), kind.encode() if kind else None)
    check_result(libc.mount(*names, flags, options.encode() or None), f"mount on {target}")


def make_read_only(path: str) -> None:
    """Make a mount read-only and keep its other flags, which the kernel lets no user namespace clear."""
    present = os.statvfs(path).f_flag
    flags = present & _KEPT_MOUNT_FLAGS | (_MS_RELATIME if present & _ST_RELATIME else 0)
    mount("none", path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def prefer_for_oom_kill() -> None:
    """Make the kernel kill this process and its children first when the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def drop_capabilities() -> None:
    """Drop every capability. With `PR_SET_NO_NEW_PRIVS` set, the process cannot regain them."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    check_result(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


class NamespaceInit:
    """
    The init process of a new pid namespace; it only sleeps.

    The kernel kills a namespace with its init process, and shields that process from signals sent inside. Model code
    must have neither property, so a separate process is init. It shares the server's memory, which avoids a copy, and
    runs `pause` on the stack of this object. It must therefore be dead before the object is freed.
    """

    def __init__(self) -> None:
        self._stack = ctypes.create_string_buffer(_STACK_BYTES)
        # The ABI wants the stack aligned to 16 bytes; it grows down from its end.
        top = (ctypes.addressof(self._stack) + _STACK_BYTES - 64) & ~15
        entry = ctypes.cast(libc.pause, ctypes.c_void_p)
        self.pid = check_result(libc.clone(entry, top, CLONE_NEWPID | _CLONE_VM | _SIGCHLD, None), "clone")

    def kill(self) -> None:
        """Kill the init process, and with it every process left in its namespace."""
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
