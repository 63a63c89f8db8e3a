"""Landlock and seccomp by themselves: the tables, the program, what each ABI handles."""

from __future__ import annotations

import errno
import itertools
import os
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox.box import landlock, seccomp
from turnwise_python_sandbox.box.syscalls import ARCHITECTURES, Architecture

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ALLOW = 0x7FFF0000
OWN_PID = 4321


def simulate(code: bytes, audit: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Run a filter as the kernel does; return what it answers."""
    data = struct.pack("<iIQ6Q", number, audit, 0, *(*arguments, *(0,) * 6)[:6])
    position, accumulator = 0, 0
    while True:
        operation, yes, no, constant = struct.unpack_from("<HBBI", code, 8 * position)
        position += 1
        if operation == 0x06:
            return constant
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
            continue
        test = {0x15: accumulator == constant, 0x25: accumulator > constant, 0x35: accumulator >= constant}
        position += yes if test.get(operation, bool(accumulator & constant)) else no


def answer(name: str, number: int, *arguments: int) -> int:
    """Return what the filter of a processor answers."""
    architecture = ARCHITECTURES[name]
    code = seccomp.assemble(seccomp.program(architecture))
    code = code.replace(struct.pack("<I", seccomp._OWN_PID), struct.pack("<I", OWN_PID))
    return simulate(code, architecture.audit, number, arguments)


def error(number: int) -> int:
    """Return the filter's answer for an error number."""
    return 0x00050000 | number


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_numbers_are_those_of_the_kernel(name: str) -> None:
    """The tables agree with this machine's kernel headers."""
    if not HEADERS[name].exists():
        pytest.skip(f"there is no {HEADERS[name]} here")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[name].read_text()))
    # The generic table spells one call differently from the name of its function.
    found.setdefault("newfstatat", found.get("fstatat", "79"))
    architecture = ARCHITECTURES[name]

    assert {n: int(found[n]) for n in architecture.allowed} == architecture.allowed
    assert {n: int(found[n]) for n in architecture.checked} == architecture.checked


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_number_gets_its_answer(name: str) -> None:
    """Allowed calls pass, checked ones are checked, unknown ones look unknown, the rest is forbidden."""
    architecture: Architecture = ARCHITECTURES[name]
    allowed, checked = set(architecture.allowed.values()), set(architecture.checked.values())
    for number in range(architecture.highest + 50):
        if number in allowed:
            assert answer(name, number) == ALLOW
        elif number > architecture.highest:
            assert answer(name, number) == error(errno.ENOSYS)
        elif number not in checked:
            assert answer(name, number) == error(errno.EPERM)
    assert allowed.isdisjoint(checked)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_arguments_are_checked(name: str) -> None:
    """Threads but no processes; pairs of streams but no datagrams; signals to oneself alone."""
    number = ARCHITECTURES[name].checked
    thread = 0x3D0F00

    assert answer(name, number["clone"], thread) == ALLOW
    assert answer(name, number["clone"], 17) == error(errno.EPERM)
    assert answer(name, number["clone"], thread | 0x20000) == error(errno.EPERM)
    assert answer(name, number["clone3"]) == error(errno.ENOSYS)
    assert answer(name, number["socketpair"], 1, 1 | 0x80000) == ALLOW
    assert answer(name, number["socketpair"], 1, 2) == error(errno.EPERM)
    assert answer(name, number["socketpair"], 2, 1) == error(errno.EPERM)
    assert answer(name, number["kill"], OWN_PID, 9) == ALLOW
    for other in (0, 1, 2**32 - 1, OWN_PID + 1):
        assert answer(name, number["kill"], other, 9) == error(errno.EPERM)
    assert answer(name, number["fcntl"], 1, 4) == ALLOW
    for command in (8, 10, 15):
        assert answer(name, number["fcntl"], 1, command) == error(errno.EINVAL)
    assert answer(name, number["prctl"], 1) == error(errno.EINVAL)


def test_another_processor_is_killed() -> None:
    """A 32-bit call from a 64-bit program would have other numbers."""
    code = seccomp.assemble(seccomp.program(ARCHITECTURES["x86_64"]))

    assert simulate(code, 0x40000003, 0) == 0x80000000
    assert simulate(code, 0xC000003E, 0x40000000 + 39) == error(errno.ENOSYS)


@given(st.sets(st.integers(0, 500), min_size=1))
def test_ranges_cover_exactly(numbers: set[int]) -> None:
    """Neighbours are joined, nothing else is."""
    found = list(seccomp.ranges(numbers))

    assert numbers == {n for first, last in found for n in range(first, last + 1)}
    assert all(b[0] - a[1] > 1 for a, b in itertools.pairwise(found))


def test_each_landlock_handles_more() -> None:
    """A later ABI handles all that an earlier one does."""
    handled = [landlock.handled_files(version) for version in range(1, 9)]

    assert handled[0] == 0x1FFF
    assert handled[4] == 0xFFFF
    assert all(a & b == a for a, b in itertools.pairwise(handled))


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6])
def test_every_landlock_that_is_here_can_be_put_on(tmp_path, version: int) -> None:
    """Each ABI up to the kernel's own is accepted, and refuses what is not granted."""
    if landlock.abi() < version:
        pytest.skip(f"this kernel has Landlock ABI {landlock.abi()}")
    (tmp_path / "in").mkdir()
    (tmp_path / "out").write_text("x")
    pid = os.fork()
    if pid == 0:
        os._exit(_restricted(tmp_path, version))

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _restricted(folder: Path, version: int) -> int:
    from turnwise_python_sandbox.box import kernel

    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    granted = landlock.Grant(os.open(folder / "in", os.O_PATH), writable=True)
    landlock.Ruleset((), version).restrict([granted])
    (folder / "in/new").write_text("fine")
    try:
        (folder / "out").read_text()
    except PermissionError:
        return 0
    return 1
