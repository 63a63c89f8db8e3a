"""
The seccomp filter: an allow-list of the system calls of honest Python programs; every other call returns an error.

This module builds classic BPF itself, because the filter must check arguments too. It allows threads but no processes,
stream socket pairs (asyncio needs one) but no sockets, and signals to the program itself only. It refuses datagram
socket pairs, because `sendto` on one reaches any Unix socket of the host by name; messages with files or urgent data;
and buffers beyond their default size, because no limit of a program counts the memory of the kernel.

File locks succeed without effect. A program is one process with files that no other process opens, so it cannot tell;
a real lock on a library would reach every program of the machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from turnwise_python_sandbox.box import kernel
from turnwise_python_sandbox.box.syscalls import ARCHITECTURES, Architecture

_LOAD: Final = 0x20
_MASK: Final = 0x54
_JUMP_EQUAL: Final = 0x15
_JUMP_GREATER: Final = 0x25
_JUMP_AT_LEAST: Final = 0x35
_JUMP_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERROR: Final = 0x00050000
_KILL: Final = 0x80000000
_NUMBER: Final = 0
_ARCH: Final = 4
_ARGUMENT: Final = 16

_PID_PLACEHOLDER: Final = 0x7EADBEEF
"""In the filter until `install` replaces it by the pid of the filtered process."""
_CLONE_THREAD: Final = 0x00010000
_CLONE_NAMESPACES: Final = 0x7E020000
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_X32: Final = 0x40000000


class FileProtection(NamedTuple):
    """
    What keeps programs from changing the files of their user, beside Landlock, which does not know modes and times.

    Attributes:
        read_only_mounts: a program sees all other files on read-only mounts (tier 1).
        dedicated_user: the user owns no other file.
        truncation: Landlock governs truncation (ABI 3).
    """

    read_only_mounts: bool
    dedicated_user: bool
    truncation: bool


Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, constant; a jump is the number of instructions to skip."""


def _statement(operation: int, constant: int) -> Instruction:
    return (operation, 0, 0, constant)


def _return_error(number: int) -> Instruction:
    return _statement(_RETURN, _ERROR | number)


_RETURN_ALLOW: Final = _statement(_RETURN, _ALLOW)


def _allow_values(argument: int, values: Iterable[int], error: int) -> list[Instruction]:
    """Allow a call if its int argument has one of the values; the kernel reads the low 32 bits of an int."""
    body = [_statement(_LOAD, _ARGUMENT + 8 * argument)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), _RETURN_ALLOW]
    return [*body, _return_error(error)]


def _allow_threads() -> list[Instruction]:
    """Allow `clone` for a thread that stays in every namespace."""
    return [
        _statement(_LOAD, _ARGUMENT),
        (_JUMP_ANY_BIT, 0, 2, _CLONE_THREAD),
        (_JUMP_ANY_BIT, 1, 0, _CLONE_NAMESPACES),
        _RETURN_ALLOW,
        _return_error(errno.EPERM),
    ]


def _allow_stream_pairs() -> list[Instruction]:
    """Allow `socketpair(AF_UNIX, SOCK_STREAM | flags)`."""
    flags = (0, 0x800, 0x80000, 0x80800)
    domain = [_statement(_LOAD, _ARGUMENT), (_JUMP_EQUAL, 1, 0, 1), _return_error(errno.EPERM)]
    return domain + _allow_values(1, (1 | each for each in flags), errno.EPERM)


def _allow_without_bit(argument: int, bit: int, error: int) -> list[Instruction]:
    load = _statement(_LOAD, _ARGUMENT + 8 * argument)
    return [load, (_JUMP_ANY_BIT, 0, 1, bit), _return_error(error), _RETURN_ALLOW]


def _allow_fcntl() -> list[Instruction]:
    body = [_statement(_LOAD, _ARGUMENT + 8)]
    for value in _SET_LOCK:
        body += [(_JUMP_EQUAL, 0, 1, value), _return_error(0)]
    return body + _allow_values(1, _FCNTL, errno.EINVAL)


def _allow_futex() -> list[Instruction]:
    """Allow the operations of locks and conditions; not those with priority inheritance."""
    load = [_statement(_LOAD, _ARGUMENT + 8), _statement(_MASK, ~_FUTEX_FLAGS & 0xFFFFFFFF)]
    return load + _allow_values(1, _FUTEX, errno.ENOSYS)[1:]


def _allow_socket_options() -> list[Instruction]:
    level = [_statement(_LOAD, _ARGUMENT + 8), (_JUMP_EQUAL, 1, 0, _SOL_SOCKET), _return_error(errno.ENOPROTOOPT)]
    return level + _allow_values(2, _SOCKET_OPTIONS, errno.ENOPROTOOPT)


def _allow_open(argument: int, protection: FileProtection) -> list[Instruction]:
    """Allow to open for reading or writing, which Landlock governs, and not for neither, which it does not."""
    load = _statement(_LOAD, _ARGUMENT + 8 * argument)
    refuse = _return_error(errno.EACCES)
    body = [load, _statement(_MASK, os.O_ACCMODE), (_JUMP_EQUAL, 0, 1, os.O_ACCMODE), refuse]
    if not (protection.read_only_mounts or protection.truncation):
        body += [load, _statement(_MASK, os.O_ACCMODE | os.O_TRUNC)]
        body += [(_JUMP_EQUAL, 0, 1, os.O_RDONLY | os.O_TRUNC), refuse]
    return [*body, _RETURN_ALLOW]


def _allow_times(protection: FileProtection) -> list[Instruction]:
    """Decide on `utimensat`: without a path it changes an open file."""
    if protection.read_only_mounts:
        return [_RETURN_ALLOW]
    refuse = _return_error(errno.EPERM)
    if not protection.dedicated_user:
        return [refuse]
    halves = (_statement(_LOAD, _ARGUMENT + 8), _statement(_LOAD, _ARGUMENT + 12))
    is_zero = [part for half in halves for part in (half, (_JUMP_EQUAL, 1, 0, 0), refuse)]
    return [*is_zero, _RETURN_ALLOW]


_FCNTL: Final = (*range(6), 36, 1030, 1032, 1034)
"""Descriptors, flags, the state of locks; never F_SETOWN or F_SETSIG, which send signals to other processes."""
_SET_LOCK: Final = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW."""
_FUTEX: Final = (0, 1, 3, 4, 5, 9, 10)
"""Waits, wakes and requeues."""
_FUTEX_FLAGS: Final = 0x180
_MSG_OOB: Final = 1
_SOL_SOCKET: Final = 1
_SOCKET_OPTIONS: Final = (2, 9, 13, 15, 20, 21)
"""Addresses and ports to use again, keep-alive, lingering, time limits; never the size of a buffer or a filter."""
_IOCTL: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS and TIOCGWINSZ (terminal or not), FIONREAD, FIONBIO, FIONCLEX and FIOCLEX."""
_PRCTL: Final = (3, 15, 16, 0x53564D41)
"""PR_GET_DUMPABLE, thread names, names of memory areas (glibc)."""


def _argument_checks(protection: FileProtection) -> dict[str, list[Instruction]]:
    """Return, by system call, the instructions that decide on it; the most frequent calls first."""
    own, own_or_zero = (_PID_PLACEHOLDER,), (0, _PID_PLACEHOLDER)
    checks = {
        "futex": _allow_futex(),
        "openat": _allow_open(2, protection),
        "open": _allow_open(1, protection),
        "clone": _allow_threads(),
        "socketpair": _allow_stream_pairs(),
        "setsockopt": _allow_socket_options(),
        "sendto": _allow_without_bit(3, _MSG_OOB, errno.EOPNOTSUPP),
        "recvfrom": _allow_without_bit(3, _MSG_OOB, errno.EINVAL),
        "recvmsg": _allow_without_bit(2, _MSG_OOB, errno.EINVAL),
        "recvmmsg": _allow_without_bit(3, _MSG_OOB, errno.EINVAL),
        "utimensat": _allow_times(protection),
        "flock": [_return_error(0)],
        "fcntl": _allow_fcntl(),
        "ioctl": _allow_values(1, _IOCTL, errno.ENOTTY),
        "prctl": _allow_values(0, _PRCTL, errno.EINVAL),
        # A filter cannot check these: the kernel reads their arguments from memory. On ENOSYS the C library falls
        # back to `clone` and `openat`.
        "clone3": [_return_error(errno.ENOSYS)],
        "openat2": [_return_error(errno.ENOSYS)],
        # It interrupts processors that run other programs.
        "membarrier": [_return_error(errno.ENOSYS)],
    }
    for name in ("kill", "tgkill", "rt_sigqueueinfo"):
        checks[name] = _allow_values(0, own, errno.EPERM)
    for name in (
        *("prlimit64", "getpgid", "getsid"),
        *("sched_getaffinity", "sched_getparam", "sched_getscheduler"),
    ):
        checks[name] = _allow_values(0, own_or_zero, errno.EPERM)
    for name in ("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"):
        # shutil.copy2 continues without attributes after ENOTSUP, and after no other error.
        checks[name] = [_return_error(errno.ENOTSUP)]
    return checks | {name: [_return_error(errno.ENOTSUP)] for name in ("setxattr", "lsetxattr", "fsetxattr")}


def merge_ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive numbers as (first, last)."""
    ordered = sorted(set(numbers))
    first = last = ordered[0]
    for number in ordered[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def list_refused_calls(protection: FileProtection) -> frozenset[str]:
    """Return the calls of the table `allowed` that would change files which nothing else protects."""
    if protection.read_only_mounts:
        return frozenset()
    return _CHANGES_BY_PATH if protection.dedicated_user else _CHANGES_BY_PATH | {"fchmod"}


_CHANGES_BY_PATH: Final = frozenset({"chmod", "fchmodat", "futimesat", "truncate", "utime", "utimes"})


def build_filter(architecture: Architecture, protection: FileProtection) -> list[Instruction]:
    """Return the filter for one processor, with the placeholder for the pid."""
    refused = list_refused_calls(protection)
    allowed = [number for name, number in architecture.allowed.items() if name not in refused]
    code = [
        _statement(_LOAD, _ARCH),
        (_JUMP_EQUAL, 1, 0, architecture.audit),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        _return_error(errno.ENOSYS),
    ]
    for first, last in merge_ranges(allowed):
        code += [(_JUMP_GREATER, 2, 0, last), (_JUMP_AT_LEAST, 0, 1, first), _RETURN_ALLOW]
    for name, body in _argument_checks(protection).items():
        if name in architecture.checked:
            code += [(_JUMP_EQUAL, 0, len(body), architecture.checked[name]), *body]
    # For a call that is newer than this table, ENOSYS makes the C library fall back to an older call.
    return [*code, (_JUMP_GREATER, 0, 1, architecture.highest), _return_error(errno.ENOSYS), _return_error(errno.EPERM)]


def assemble(instructions: Iterable[Instruction]) -> bytes:
    """Return the instructions as an array of `struct sock_filter`."""
    return b"".join(struct.pack("<HBBI", *each) for each in instructions)


def assemble_filter(protection: FileProtection) -> bytes:
    """Return the filter for this machine; raise `OSError` if its processor is unknown."""
    architecture = ARCHITECTURES.get(os.uname().machine)
    if architecture is None:
        raise OSError(errno.ENOSYS, f"no system call table for the processor {os.uname().machine}")
    return assemble(build_filter(architecture, protection))


def install(template: bytes) -> None:
    """Filter this process and its later threads irreversibly; needs `PR_SET_NO_NEW_PRIVS`."""
    code = template.replace(struct.pack("<I", _PID_PLACEHOLDER), struct.pack("<I", os.getpid()))
    instructions = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: a count, padding, a pointer.
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions)))
    kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(filter_))
