"""
Landlock: the kernel's allow-list of files for this process (https://docs.kernel.org/userspace-api/landlock.html).

Each ABI version can refuse more kinds of access. Seccomp refuses the accesses that Landlock of an older kernel cannot.
"""

from __future__ import annotations

import ctypes
import errno
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

TRUNCATION_ABI: Final = 3
_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_REFER: Final = 1 << 13
_TRUNCATE: Final = 1 << 14
_IOCTL_DEV: Final = 1 << 15
_ACCESS_OF_ABI_1: Final = (1 << 13) - 1
_FILE_ACCESS: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""The rights that apply to a file; the others apply to directories only."""
_MAKE_DEVICES: Final = (1 << 6) | (1 << 9) | (1 << 11)
"""Creating character devices, sockets and block devices."""
_TCP_BIND_AND_CONNECT: Final = 0b11
_SIGNAL_AND_ABSTRACT_SOCKET_SCOPES: Final = 0b11


class PathRule(NamedTuple):
    """An open file or directory (`O_PATH` is enough) that may be read, and written if `writable`."""

    fd: int
    writable: bool = False


def open_path_rules(paths: Sequence[str], *, writable: bool) -> list[PathRule]:
    """Open paths and return their rules; paths that do not exist or cannot be reached are left out."""
    rules = []
    for path in paths:
        try:
            rules.append(PathRule(os.open(path, os.O_PATH | os.O_CLOEXEC), writable))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOTDIR):
                raise
    return rules


def detect_abi() -> int:
    """Return the kernel's Landlock ABI version; 0 if it has none or a container's seccomp filter blocks it."""
    try:
        return kernel.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def handled_access(abi: int) -> int:
    """Return the bit set of the file access rights that an ABI version can refuse."""
    later = {2: _REFER, TRUNCATION_ABI: _TRUNCATE, 5: _IOCTL_DEV}
    return _ACCESS_OF_ABI_1 | sum(bit for since, bit in later.items() if abi >= since)


class Ruleset:
    """
    An allow-list, built once by the server and applied by each fork.

    Args:
        rules: all that may be reached.
        abi: ABI version, at least 1. From 4 on, TCP is refused; from 6 on, signals to processes outside the sandbox
            and abstract sockets outside it.
    """

    def __init__(self, rules: Sequence[PathRule], abi: int) -> None:
        self._abi = abi
        self._rules = [_encode_rule(rule, abi) for rule in rules]

    def restrict_self(self, own: Sequence[PathRule]) -> None:
        """Restrict this process irreversibly to the ruleset and its `own` rules; needs `PR_SET_NO_NEW_PRIVS`."""
        tcp = _TCP_BIND_AND_CONNECT if self._abi >= 4 else 0
        scopes = _SIGNAL_AND_ABSTRACT_SOCKET_SCOPES if self._abi >= 6 else 0
        attributes = (ctypes.c_uint64 * 3)(handled_access(self._abi), tcp, scopes)
        # An older kernel refuses a structure with fields that it does not know.
        size = 24 if self._abi >= 6 else 16 if self._abi >= 4 else 8
        ruleset = kernel.syscall(_CREATE_RULESET, attributes, size, 0)
        for rule in (*self._rules, *(_encode_rule(rule, self._abi) for rule in own)):
            kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)


def _encode_rule(rule: PathRule, abi: int) -> ctypes.Array[ctypes.c_char]:
    """Return the packed `struct landlock_path_beneath_attr`: u64 access, s32 descriptor."""
    access = handled_access(abi) & ~_EXECUTE & ~_MAKE_DEVICES & ~_IOCTL_DEV
    if not rule.writable:
        access &= _READ_FILE | _READ_DIR
    if not stat.S_ISDIR(os.fstat(rule.fd).st_mode):
        access &= _FILE_ACCESS
    return ctypes.create_string_buffer(access.to_bytes(8, "little") + rule.fd.to_bytes(4, "little"), 12)
