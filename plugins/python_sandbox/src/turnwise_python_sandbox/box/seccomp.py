"""
The seccomp filter: an allow-list of the system calls of honest Python programs; every other call returns an error.

This module builds classic BPF itself, because the filter must check arguments too. It allows threads but no processes,
stream socket pairs (asyncio needs one) but no sockets, and signals to the program itself only. It refuses datagram
socket pairs, because `sendto` on one reaches any Unix socket of the host by name.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from turnwise_python_sandbox.box import kernel
from turnwise_python_sandbox.box.syscalls import ARCHITECTURES, Architecture

_LOAD: Final = 0x20
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


_FCNTL: Final = (*range(8), 36, 37, 38, 1030, 1031, 1032, 1034)
"""Descriptors, flags, locks and pipe sizes; never F_SETOWN or F_SETSIG, which send signals to other processes."""
_IOCTL: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS and TIOCGWINSZ (terminal or not), FIONREAD, FIONBIO, FIONCLEX and FIOCLEX."""
_PRCTL: Final = (3, 15, 16, 0x53564D41)
"""PR_GET_DUMPABLE, thread names, names of memory areas (glibc)."""


def _argument_checks() -> dict[str, list[Instruction]]:
    """Return, by system call, the instructions that decide on it."""
    own, own_or_zero = (_PID_PLACEHOLDER,), (0, _PID_PLACEHOLDER)
    checks = {
        "clone": _allow_threads(),
        "socketpair": _allow_stream_pairs(),
        "fcntl": _allow_values(1, _FCNTL, errno.EINVAL),
        "ioctl": _allow_values(1, _IOCTL, errno.ENOTTY),
        "prctl": _allow_values(0, _PRCTL, errno.EINVAL),
        # A filter cannot check these: the kernel reads their arguments from memory. On ENOSYS the C library falls
        # back to `clone` and `openat`.
        "clone3": [_return_error(errno.ENOSYS)],
        "openat2": [_return_error(errno.ENOSYS)],
    }
    for name in ("kill", "tgkill", "rt_sigqueueinfo"):
        checks[name] = _allow_values(0, own, errno.EPERM)
    for name in (
        *("prlimit64", "getpgid", "getsid"),
        *("sched_getaffinity", "sched_setaffinity", "sched_getparam", "sched_getscheduler"),
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


def build_filter(architecture: Architecture) -> list[Instruction]:
    """Return the filter for one processor, with the placeholder for the pid."""
    code = [
        _statement(_LOAD, _ARCH),
        (_JUMP_EQUAL, 1, 0, architecture.audit),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        _return_error(errno.ENOSYS),
    ]
    for first, last in merge_ranges(architecture.allowed.values()):
        code += [(_JUMP_GREATER, 2, 0, last), (_JUMP_AT_LEAST, 0, 1, first), _RETURN_ALLOW]
    for name, body in _argument_checks().items():
        if name in architecture.checked:
            code += [(_JUMP_EQUAL, 0, len(body), architecture.checked[name]), *body]
    # For a call that is newer than this table, ENOSYS makes the C library fall back to an older call.
    return [*code, (_JUMP_GREATER, 0, 1, architecture.highest), _return_error(errno.ENOSYS), _return_error(errno.EPERM)]


def assemble(instructions: Iterable[Instruction]) -> bytes:
    """Return the instructions as an array of `struct sock_filter`."""
    return b"".join(struct.pack("<HBBI", *each) for each in instructions)


def assemble_filter() -> bytes:
    """Return the filter for this machine; raise `OSError` if its processor is unknown."""
    architecture = ARCHITECTURES.get(os.uname().machine)
    if architecture is None:
        raise OSError(errno.ENOSYS, f"no system call table for the processor {os.uname().machine}")
    return assemble(build_filter(architecture))


def install(template: bytes) -> None:
    """Filter this process and its later threads irreversibly; needs `PR_SET_NO_NEW_PRIVS`."""
    code = template.replace(struct.pack("<I", _PID_PLACEHOLDER), struct.pack("<I", os.getpid()))
    instructions = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: a count, padding, a pointer.
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions)))
    kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(filter_))
