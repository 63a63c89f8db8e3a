"""The seccomp filter, against an independent interpreter of BPF, a specification, and the kernel."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox.box import kernel, seccomp
from turnwise_python_sandbox.box.seccomp import FileProtection
from turnwise_python_sandbox.box.syscalls import ARCHITECTURES

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
X32 = 0x40000000
OWN_PID = 4321
DATA_BYTES = 64
"""Size of `struct seccomp_data`."""
LOAD, RETURN = 0x20, 0x06
JUMPS: dict[int, Callable[[int, int], bool]] = {
    0x15: lambda value, constant: value == constant,
    0x25: lambda value, constant: value > constant,
    0x35: lambda value, constant: value >= constant,
    0x45: lambda value, constant: value & constant != 0,
}
MASK = 0x54
TIER_1 = FileProtection(read_only_mounts=True, dedicated_user=False, truncation=False)
TIER_2_BY_ROOT = FileProtection(read_only_mounts=False, dedicated_user=True, truncation=True)
TIER_2 = FileProtection(read_only_mounts=False, dedicated_user=False, truncation=True)
TIER_2_OLD = FileProtection(read_only_mounts=False, dedicated_user=False, truncation=False)
NAMES = pytest.mark.parametrize("name", ARCHITECTURES)
PROTECTIONS = pytest.mark.parametrize("protection", [TIER_1, TIER_2_BY_ROOT, TIER_2, TIER_2_OLD])
WORDS = st.integers(0, 2**64 - 1)


def error(number: int) -> int:
    """Return the action that makes a system call fail with an error number."""
    return 0x00050000 | number


@functools.cache
def instructions(name: str, protection: FileProtection) -> list[tuple[int, int, int, int]]:
    """Return the filter of a processor, decoded from its bytes, for the process `OWN_PID`."""
    code = seccomp.assemble(seccomp.build_filter(ARCHITECTURES[name], protection))
    code = code.replace(struct.pack("<I", seccomp._PID_PLACEHOLDER), struct.pack("<I", OWN_PID))
    return list(struct.iter_unpack("<HBBI", code))


def interpret(name: str, protection: FileProtection, audit: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Interpret a filter as the kernel does, and return its action."""
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, audit, 0, *(*arguments, *(0,) * 6)[:6])
    position, accumulator = 0, 0
    while True:
        operation, yes, no, constant = instructions(name, protection)[position]
        position += 1
        if operation == RETURN:
            return constant
        if operation == LOAD:
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == MASK:
            accumulator &= constant
        else:
            position += yes if JUMPS[operation](accumulator, constant) else no


def decide(name: str, protection: FileProtection, number: int, *arguments: int) -> int:
    """Return the action of a processor's filter for a native system call."""
    return interpret(name, protection, ARCHITECTURES[name].audit, number, arguments)


NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
FCNTL = {0, 1, 2, 3, 4, 5, 36, 1030, 1032, 1034}
LOCKS = {6, 7, 37, 38}
IOCTL = {0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451}
PRCTL = {3, 15, 16, 0x53564D41}
FUTEX = {0, 1, 3, 4, 5, 9, 10}
SOCKET_OPTIONS = {2, 9, 13, 15, 20, 21}
OWN_ONLY = ("kill", "tgkill", "rt_sigqueueinfo")
OWN_OR_ZERO = ("prlimit64", "getpgid", "getsid", "sched_getaffinity", "sched_getparam", "sched_getscheduler")
BY_PATH = ("chmod", "fchmodat", "futimesat", "truncate", "utime", "utimes")
NEVER = ("clone3", "openat2", "membarrier")
SKIPPED_BY_SECCOMP = (335, 336)
"""uretprobe and uprobe of x86-64: newer kernels do not filter them, and kill a process that makes them by hand."""
ERRORS = {
    **dict.fromkeys(("fcntl", "prctl", "recvfrom", "recvmsg", "recvmmsg"), errno.EINVAL),
    **dict.fromkeys(("open", "openat"), errno.EACCES),
    **{"ioctl": errno.ENOTTY, "futex": errno.ENOSYS, "setsockopt": errno.ENOPROTOOPT, "sendto": errno.EOPNOTSUPP},
}


def permits(call: str, protection: FileProtection, words: tuple[int, ...]) -> bool:
    """Return whether the documentation promises that a checked call is allowed with these arguments."""
    # The kernel reads the low 32 bits of an int argument, and all of a pointer.
    first, second, third, fourth = (word & 0xFFFFFFFF for word in words[:4])
    permitted = {
        "clone": first & 0x00010000 != 0 and first & NAMESPACES == 0,
        "socketpair": first == 1 and second & ~0x80800 == 1,
        "fcntl": second in FCNTL,
        "ioctl": second in IOCTL,
        "prctl": first in PRCTL,
        "futex": second & ~0x180 in FUTEX,
        "open": may_open(second, protection),
        "openat": may_open(third, protection),
        "setsockopt": second == 1 and third in SOCKET_OPTIONS,
        "utimensat": protection.read_only_mounts or (protection.dedicated_user and words[1] == 0),
    }
    permitted |= dict.fromkeys(("sendto", "recvfrom", "recvmmsg"), fourth & 1 == 0) | {"recvmsg": third & 1 == 0}
    permitted |= dict.fromkeys(OWN_ONLY, first == OWN_PID)
    return permitted.get(call, call in OWN_OR_ZERO and first in (0, OWN_PID))


def may_open(flags: int, protection: FileProtection) -> bool:
    """Return whether a file may be opened: not for neither reading nor writing, nor truncated behind Landlock."""
    truncates = flags & 0o1003 == 0o1000 and protection == TIER_2_OLD
    return flags & 3 != 3 and not truncates


def specify(name: str, protection: FileProtection, number: int, arguments: tuple[int, ...]) -> int:
    """Return the action that the documentation promises for a system call."""
    architecture = ARCHITECTURES[name]
    call = {value: key for key, value in (architecture.checked | architecture.allowed).items()}.get(number, "")
    if number & 0xFFFFFFFF >= X32 or number > architecture.highest or call in NEVER:
        return error(errno.ENOSYS)
    if call == "flock" or (call == "fcntl" and arguments[1] & 0xFFFFFFFF in LOCKS):
        return error(0)
    refused = not protection.read_only_mounts and call in BY_PATH
    if refused or (call == "fchmod" and protection in (TIER_2, TIER_2_OLD)):
        return error(errno.EPERM)
    if number in architecture.allowed.values() or permits(call, protection, arguments):
        return ALLOW
    return error(errno.ENOTSUP if call.endswith("xattr") else ERRORS.get(call, errno.EPERM))


@pytest.fixture
def run_filtered(run_in_child) -> Callable[..., object]:
    """Returns the value of a function that runs in a child under this machine's filter."""
    if os.uname().machine not in ARCHITECTURES:
        pytest.skip(f"there is no table for {os.uname().machine}")

    def install_and_run(function: Callable[[], object], protection: FileProtection) -> object:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(seccomp.assemble_filter(protection))
        return function()

    return lambda function, protection=TIER_1: run_in_child(lambda: install_and_run(function, protection))


def errno_of(action: Callable[[], object]) -> int:
    """Return the error number of an action; 0 if it succeeds."""
    try:
        action()
    except OSError as caught:
        return caught.errno
    return 0


@NAMES
def test_numbers_match_the_kernel(name: str) -> None:
    """The tables have the numbers of this machine's kernel headers."""
    if not HEADERS[name].exists():
        pytest.skip(f"there is no {HEADERS[name]} here")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[name].read_text()))
    # The generic header has another name for this call.
    found.setdefault("newfstatat", found.get("fstatat", "79"))
    architecture = ARCHITECTURES[name]

    assert {n: int(found[n]) for n in architecture.allowed} == architecture.allowed
    assert {n: int(found[n]) for n in architecture.checked} == architecture.checked


@NAMES
def test_a_call_is_allowed_or_checked(name: str) -> None:
    """No number is in both tables, none twice, and none above the highest."""
    architecture = ARCHITECTURES[name]
    numbers = [*architecture.allowed.values(), *architecture.checked.values()]

    assert len(set(numbers)) == len(numbers)
    assert max(numbers) <= architecture.highest


@NAMES
@PROTECTIONS
def test_every_checked_call_has_a_check(name: str, protection: FileProtection) -> None:
    """The table of checked calls and the checks name the same calls, so that none falls through unnoticed."""
    # The call of x86-64 only.
    absent = {"open"} if name == "aarch64" else set()

    assert set(ARCHITECTURES[name].checked) == set(seccomp._argument_checks(protection)) - absent


@NAMES
@PROTECTIONS
def test_every_number_has_its_action(name: str, protection: FileProtection) -> None:
    """For every number, with zeros as arguments, the filter does what the specification says."""
    for number in range(ARCHITECTURES[name].highest + 50):
        assert decide(name, protection, number) == specify(name, protection, number, (0,) * 6), number


@NAMES
@PROTECTIONS
@given(data=st.data())
def test_arguments_are_checked(name: str, protection: FileProtection, data: st.DataObject) -> None:
    """For checked calls with any arguments, the filter does what the specification says."""
    number = data.draw(st.sampled_from(sorted(ARCHITECTURES[name].checked.values())))
    likely = st.sampled_from(
        [
            *range(11),
            15,
            16,
            20,
            26,
            37,
            0o1000,
            0o1001,
            0x81,
            0x189,
            OWN_PID,
            OWN_PID + 1,
            0x5401,
            0x10000,
            0x3D0F00,
            2**32,
        ]
    )
    arguments = tuple(data.draw(likely | WORDS) for _ in range(6))

    assert decide(name, protection, number, *arguments) == specify(name, protection, number, arguments)


@NAMES
@PROTECTIONS
@given(number=st.integers(-(2**31), 2**31 - 1), arguments=st.tuples(*[WORDS] * 6))
def test_any_call_has_its_action(
    name: str, protection: FileProtection, number: int, arguments: tuple[int, ...]
) -> None:
    """For any number at all, x32 and negative ones included, the filter does what the specification says."""
    assert decide(name, protection, number, *arguments) == specify(name, protection, number, arguments)


@NAMES
@PROTECTIONS
@given(audit=st.integers(0, 2**32 - 1), number=st.integers(0, 500))
def test_calls_of_another_architecture_kill_the_program(
    name: str, protection: FileProtection, audit: int, number: int
) -> None:
    """A call under another audit number, such as a 32-bit one, has other numbers and is fatal."""
    if audit != ARCHITECTURES[name].audit:
        assert interpret(name, protection, audit, number) == KILL_PROCESS


@NAMES
@PROTECTIONS
def test_the_filter_is_valid_bpf(name: str, protection: FileProtection) -> None:
    """As the kernel's checker demands: short, forward jumps to instructions, aligned loads, returns at the end."""
    code = instructions(name, protection)

    assert len(code) <= 4096
    assert code[-1][0] == RETURN
    for position, (operation, yes, no, constant) in enumerate(code):
        assert operation in {LOAD, MASK, RETURN, *JUMPS}
        if operation == LOAD:
            assert constant % 4 == 0
            assert constant + 4 <= DATA_BYTES
        elif operation == RETURN:
            assert constant in (ALLOW, KILL_PROCESS) or constant & 0xFFFF0000 == 0x00050000
        elif operation in JUMPS:
            assert position + 1 + max(yes, no) < len(code)


@NAMES
@PROTECTIONS
def test_the_filter_has_no_dead_instruction(name: str, protection: FileProtection) -> None:
    """Every instruction can be reached: a wrong jump distance would leave some out."""
    code, reached, pending = instructions(name, protection), set(), [0]
    while pending:
        position = pending.pop()
        if position in reached:
            continue
        reached.add(position)
        operation, yes, no, _ = code[position]
        if operation in JUMPS:
            pending += [position + 1 + yes, position + 1 + no]
        elif operation in (LOAD, MASK):
            pending.append(position + 1)

    assert reached == set(range(len(code)))


@given(st.sets(st.integers(0, 500), min_size=1))
def test_ranges_cover_exactly(numbers: set[int]) -> None:
    """The ranges contain exactly the given numbers, and consecutive numbers share a range."""
    found = list(seccomp.merge_ranges(numbers))

    assert numbers == {n for first, last in found for n in range(first, last + 1)}
    assert all(b[0] - a[1] > 1 for a, b in itertools.pairwise(found))


def test_an_unknown_processor_is_an_error(monkeypatch) -> None:
    """Without a table there is no filter, and the error names the processor."""
    monkeypatch.setattr(seccomp.os, "uname", lambda: os.uname_result(("Linux", "host", "6", "1", "riscv64")))

    with pytest.raises(OSError, match="riscv64"):
        seccomp.assemble_filter(TIER_1)


@pytest.mark.parametrize("protection", [TIER_1, TIER_2_BY_ROOT, TIER_2_OLD])
def test_the_kernel_agrees_on_every_refused_call(run_filtered, protection: FileProtection) -> None:
    """Each number that the specification refuses fails with the same error in a filtered process."""
    machine = os.uname().machine
    actions = {n: specify(machine, protection, n, (0,) * 6) for n in range(500)} if machine in ARCHITECTURES else {}
    refused = {n: action & 0xFFFF for n, action in actions.items() if action != ALLOW and n not in SKIPPED_BY_SECCOMP}

    def call_all() -> list[int]:
        return [errno_of(functools.partial(kernel.syscall, number, *[0] * 6)) for number in refused]

    assert list(refused.values()) == run_filtered(call_all, protection)


def test_a_filtered_process_is_confined(run_filtered) -> None:
    """Signals to itself and stream pairs work; signals to others, processes and sockets do not."""
    actions = (
        lambda: os.kill(os.getpid(), 0),
        lambda: os.kill(os.getppid(), 0),
        lambda: os.fork(),
        lambda: kernel.syscall(ARCHITECTURES[os.uname().machine].checked["prlimit64"], os.getppid(), 0, 0, 0),
        lambda: os.open("/", os.O_RDONLY),
    )

    assert [0, errno.EPERM, errno.EPERM, errno.EPERM, 0] == run_filtered(lambda: [errno_of(each) for each in actions])


def test_the_filter_lets_threads_start(run_filtered) -> None:
    """A filtered process can start a thread, which is filtered too."""

    def fork_in_thread() -> list[int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(errno_of(os.fork)))
        thread.start()
        thread.join()
        return found

    assert [errno.EPERM] == run_filtered(fork_in_thread)


def test_the_filter_cannot_be_replaced(run_filtered) -> None:
    """A filtered process can neither install a second filter nor read or change its privileges."""
    actions = (
        lambda: seccomp.install(seccomp.assemble_filter(TIER_1)),
        lambda: kernel.prctl(kernel.PR_SET_DUMPABLE, 1),
        lambda: kernel.prctl(kernel.PR_SET_PDEATHSIG, 0),
        kernel.drop_capabilities,
    )
    expected = [errno.EINVAL, errno.EINVAL, errno.EINVAL, errno.EPERM]

    assert expected == run_filtered(lambda: [errno_of(each) for each in actions])
