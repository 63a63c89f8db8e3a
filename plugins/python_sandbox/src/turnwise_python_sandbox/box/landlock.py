"""
Landlock: an allow-list of files for this process, by the kernel's own check (https://docs.kernel.org/userspace-api/landlock.html).

Each ABI adds what it can refuse; what an older kernel cannot refuse is left to seccomp.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from turnwise_python_sandbox.box import kernel

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION_FLAG: Final = 1
_RULE_PATH_BENEATH: Final = 1

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_REFER: Final = 1 << 13
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
_FIRST_ABI: Final = (1 << 13) - 1
_ON_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_MAKE_DEVICES: Final = (1 << 6) | (1 << 9) | (1 << 11)
"""Character devices, sockets and block devices."""


class Grant(NamedTuple):
    """An open file or directory (an `O_PATH` descriptor will do) and whether it may be written as well as read."""

    fd: int
    writable: bool = False


def abi() -> int:
    """Return which Landlock the kernel has; 0 when it has none, or a container's filter hides it."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def handled_files(version: int) -> int:
    """Return the file accesses that this ABI can refuse."""
    later = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
    return _FIRST_ABI | sum(bit for since, bit in later.items() if version >= since)


class Ruleset:
    """
    An allow-list, prepared once and put on by each fork.

    Args:
        grants: what may be reached; everything else may not.
        version: the ABI, at least 1. From 4 on TCP is refused too, from 6 on others' signals and abstract sockets.
    """

    def __init__(self, grants: Sequence[Grant], version: int) -> None:
        self._version = version
        self._rules = [_rule(grant, version) for grant in grants]

    def restrict(self, own: Sequence[Grant]) -> None:
        """Confine this process, for good; it must have `PR_SET_NO_NEW_PRIVS`. `own` is granted to it besides."""
        tcp = 0b11 if self._version >= 4 else 0
        scopes = 0b11 if self._version >= 6 else 0
        attributes = (ctypes.c_uint64 * 3)(handled_files(self._version), tcp, scopes)
        size = 24 if self._version >= 6 else 16 if self._version >= 4 else 8
        ruleset = kernel.syscall(_CREATE_RULESET, attributes, size, 0)
        for rule in (*self._rules, *(_rule(grant, self._version) for grant in own)):
            kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)


def _rule(grant: Grant, version: int) -> ctypes.Array[ctypes.c_char]:
    """Return `struct landlock_path_beneath_attr`, which is packed: u64 access, s32 descriptor."""
    access = handled_files(version) & ~_EXECUTE & ~_MAKE_DEVICES & ~_IOCTL_DEV
    if not grant.writable:
        access &= _READ_FILE | _READ_DIR
    if not stat.S_ISDIR(os.fstat(grant.fd).st_mode):
        access &= _ON_FILES
    return ctypes.create_string_buffer(access.to_bytes(8, "little") + grant.fd.to_bytes(4, "little"), 12)
