"""
The filter on system calls: what honest Python programs use is allowed, everything else fails with an error number.

It is classic BPF, written here by hand, since its arguments matter as much as its numbers: threads but no process, a
stream socket pair (asyncio needs one) but no socket, signals to oneself alone. A datagram pair is refused because
`sendto` on one reaches any Unix socket of the host by name.
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

_OWN_PID: Final = 0x7EADBEEF
"""Stands for the pid of the process to be filtered until `install` knows it."""
_CLONE_THREAD: Final = 0x00010000
_CLONE_NAMESPACES: Final = 0x7E020000
_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_X32: Final = 0x40000000

Instruction = tuple[int, int, int, int]
"""Code, jump when true, jump when false, constant; a jump counts the instructions that it leaves out."""


def _statement(code: int, constant: int) -> Instruction:
    return (code, 0, 0, constant)


def _error(number: int) -> Instruction:
    return _statement(_RETURN, _ERROR | number)


_YES: Final = _statement(_RETURN, _ALLOW)


def _one_of(argument: int, values: Iterable[int], otherwise: int) -> list[Instruction]:
    """Allow a call whose int argument is one of the values; the kernel reads the low 32 bits of it."""
    body = [_statement(_LOAD, _ARGUMENT + 8 * argument)]
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), _YES]
    return [*body, _error(otherwise)]


def _threads_only() -> list[Instruction]:
    """Allow `clone` for a thread that stays in every namespace."""
    return [
        _statement(_LOAD, _ARGUMENT),
        (_JUMP_ANY_BIT, 0, 2, _CLONE_THREAD),
        (_JUMP_ANY_BIT, 1, 0, _CLONE_NAMESPACES),
        _YES,
        _error(errno.EPERM),
    ]


def _stream_pairs_only() -> list[Instruction]:
    """Allow `socketpair(AF_UNIX, SOCK_STREAM | flags)`."""
    flags = (0, 0x800, 0x80000, 0x80800)
    domain = [_statement(_LOAD, _ARGUMENT), (_JUMP_EQUAL, 1, 0, 1), _error(errno.EPERM)]
    return domain + _one_of(1, (1 | each for each in flags), errno.EPERM)


_FCNTL: Final = (*range(8), 36, 37, 38, 1030, 1031, 1032, 1034)
"""Descriptors, flags, locks and pipe sizes; never F_SETOWN or F_SETSIG, which send signals to others."""
_IOCTL: Final = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Is it a terminal, how much can be read, non-blocking, close on exec."""
_PRCTL: Final = (3, 15, 16, 0x53564D41)
"""PR_GET_DUMPABLE, thread names, names of memory areas (glibc)."""


def _checks() -> dict[str, list[Instruction]]:
    own, own_or_zero = (_OWN_PID,), (0, _OWN_PID)
    checks = {
        "clone": _threads_only(),
        "socketpair": _stream_pairs_only(),
        "fcntl": _one_of(1, _FCNTL, errno.EINVAL),
        "ioctl": _one_of(1, _IOCTL, errno.ENOTTY),
        "prctl": _one_of(0, _PRCTL, errno.EINVAL),
        # The C library falls back to what can be checked: the kernel reads these arguments from memory.
        "clone3": [_error(errno.ENOSYS)],
        "openat2": [_error(errno.ENOSYS)],
    }
    for name in ("kill", "tgkill", "rt_sigqueueinfo"):
        checks[name] = _one_of(0, own, errno.EPERM)
    for name in ("prlimit64", "getpgid", "getsid", "sched_getaffinity", "sched_setaffinity"):
        checks[name] = _one_of(0, own_or_zero, errno.EPERM)
    for name in ("sched_getparam", "sched_getscheduler"):
        checks[name] = _one_of(0, own_or_zero, errno.EPERM)
    for name in ("getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"):
        # shutil.copy2 goes on without attributes after this number, and after no other.
        checks[name] = [_error(errno.ENOTSUP)]
    return checks | {name: [_error(errno.ENOTSUP)] for name in ("setxattr", "lsetxattr", "fsetxattr")}


def ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of neighbouring numbers, as (first, last)."""
    ordered = sorted(set(numbers))
    first = last = ordered[0]
    for number in ordered[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def program(architecture: Architecture) -> list[Instruction]:
    """Return the filter for one processor, with a stand-in for the pid."""
    code = [
        _statement(_LOAD, _ARCH),
        (_JUMP_EQUAL, 1, 0, architecture.audit),
        _statement(_RETURN, _KILL),
        _statement(_LOAD, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        _error(errno.ENOSYS),
    ]
    for first, last in ranges(architecture.allowed.values()):
        code += [(_JUMP_GREATER, 2, 0, last), (_JUMP_AT_LEAST, 0, 1, first), _YES]
    for name, body in _checks().items():
        if name in architecture.checked:
            code += [(_JUMP_EQUAL, 0, len(body), architecture.checked[name]), *body]
    # A C library newer than this table must learn that the call is unknown, and fall back.
    return [*code, (_JUMP_GREATER, 0, 1, architecture.highest), _error(errno.ENOSYS), _error(errno.EPERM)]


def assemble(instructions: Iterable[Instruction]) -> bytes:
    """Return `struct sock_filter` after `struct sock_filter`."""
    return b"".join(struct.pack("<HBBI", *each) for each in instructions)


def prepared() -> bytes:
    """Return the filter for this machine; `OSError` when its processor is not known."""
    architecture = ARCHITECTURES.get(os.uname().machine)
    if architecture is None:
        raise OSError(errno.ENOSYS, f"no system call table for {os.uname().machine}")
    return assemble(program(architecture))


def install(template: bytes) -> None:
    """Filter this process and its later threads, for good. `PR_SET_NO_NEW_PRIVS` must be set."""
    code = template.replace(struct.pack("<I", _OWN_PID), struct.pack("<I", os.getpid()))
    instructions = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: a count, padding, a pointer.
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions)))
    kernel.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(filter_))
