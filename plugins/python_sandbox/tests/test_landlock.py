"""Landlock: the access rights of each ABI, the encoded rules, and their effect in the kernel."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise_python_sandbox.box import kernel, landlock
from turnwise_python_sandbox.box.landlock import PathRule

ABIS = range(1, 9)
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 0x1, 0x2, 0x4, 0x8
REMOVE_DIR, REMOVE_FILE = 0x10, 0x20
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15


def decode_rule(path: Path | str, *, writable: bool, abi: int) -> int:
    """Return the access rights in the encoded rule of a path."""
    fd = os.open(path, os.O_PATH)
    try:
        encoded = landlock._encode_rule(PathRule(fd, writable), abi)
    finally:
        os.close(fd)
    access, encoded_fd = struct.unpack("<Qi", bytes(encoded))
    assert encoded_fd == fd
    return access


@pytest.fixture
def run_restricted(run_in_child) -> Callable[..., object]:
    """Returns the value of a function that runs in a child with rules for some paths, and skips missing ABIs."""

    def run(function: Callable[[], object], readable: list[Path], writable: list[Path], abi: int = 1) -> object:
        if landlock.detect_abi() < abi:
            pytest.skip(f"this kernel has Landlock ABI {landlock.detect_abi()}")

        def restrict_and_run() -> object:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            rules = landlock.open_path_rules([str(path) for path in readable], writable=False)
            own = landlock.open_path_rules([str(path) for path in writable], writable=True)
            landlock.Ruleset(rules, abi).restrict_self(own)
            return function()

        return run_in_child(restrict_and_run)

    return run


def succeeds(action: Callable[[], object]) -> bool:
    """Return whether an action succeeds. Landlock refuses with these errors; any other one is a mistake of the test."""
    try:
        action()
    except OSError as caught:
        if caught.errno not in (errno.EACCES, errno.EXDEV, errno.EPERM):
            raise
        return False
    return True


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Three folders with a file each."""
    found = tuple(tmp_path / name for name in ("readable", "writable", "outside"))
    for folder in found:
        folder.mkdir()
        (folder / "file").write_text("content")
    return found


def test_each_abi_handles_more() -> None:
    """A later ABI handles every access right of an earlier one."""
    handled = [landlock.handled_access(abi) for abi in ABIS]

    assert handled[:5] == [0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF]
    assert all(a & b == a for a, b in itertools.pairwise(handled))


@pytest.mark.parametrize("abi", ABIS)
@pytest.mark.parametrize("target", ["folder", "file"])
def test_a_rule_grants_only_handled_rights(tmp_path, target: str, abi: int) -> None:
    """The kernel refuses a rule with other rights; a readable path has a part of a writable one's."""
    (tmp_path / "file").touch()
    path = tmp_path if target == "folder" else tmp_path / "file"
    readable, writable = (decode_rule(path, writable=each, abi=abi) for each in (False, True))

    assert readable | writable == writable
    assert writable & ~landlock.handled_access(abi) == 0
    assert writable != readable


@pytest.mark.parametrize("abi", ABIS)
def test_no_rule_grants_execution_or_devices(tmp_path, abi: int) -> None:
    """No path may be executed, and no rule allows device files, sockets or device ioctls."""
    writable = decode_rule(tmp_path, writable=True, abi=abi) | decode_rule(os.devnull, writable=True, abi=abi)

    assert writable & (EXECUTE | MAKE_CHAR | MAKE_BLOCK | MAKE_SOCK | IOCTL_DEV) == 0


def test_the_rights_of_each_kind_of_path(tmp_path) -> None:
    """Exact sets for a folder and a device, readable and writable, at ABI 6."""
    folder_rights = [decode_rule(tmp_path, writable=each, abi=6) for each in (False, True)]
    device_rights = [decode_rule(os.devnull, writable=each, abi=6) for each in (False, True)]
    changes = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE

    assert [READ_FILE | READ_DIR, READ_FILE | READ_DIR | changes] == folder_rights
    assert [READ_FILE, READ_FILE | WRITE_FILE | TRUNCATE] == device_rights


def test_missing_paths_have_no_rule(tmp_path) -> None:
    """Paths that do not exist are left out; the others keep their order."""
    (tmp_path / "file").touch()
    paths = [str(tmp_path), str(tmp_path / "none"), str(tmp_path / "file"), str(tmp_path / "file/below")]
    rules = landlock.open_path_rules(paths, writable=True)

    assert [True, False] == [stat.S_ISDIR(os.fstat(rule.fd).st_mode) for rule in rules]
    assert [True, True] == [rule.writable for rule in rules]
    for rule in rules:
        os.close(rule.fd)


def test_other_errors_of_a_path_are_raised(monkeypatch) -> None:
    """A lack of descriptors must not shrink the allow-list in silence."""

    def fail(*_arguments: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(landlock.os, "open", fail)
        with pytest.raises(OSError, match="too many"):
            landlock.open_path_rules(["/"], writable=False)


def test_a_kernel_without_landlock_has_abi_0(monkeypatch) -> None:
    """A call that does not exist, or that a container blocks, means ABI 0 and no error."""

    def fail(*_arguments: object) -> int:
        raise OSError(errno.EPERM, "blocked")

    monkeypatch.setattr(landlock.kernel, "syscall", fail)

    assert landlock.detect_abi() == 0


@pytest.mark.parametrize("abi", [1, 2, 3, 4, 5, 6])
def test_every_abi_of_this_kernel_restricts(run_restricted, folders, abi: int) -> None:
    """The kernel accepts a ruleset for each ABI up to its own, and refuses files without a rule."""
    readable, writable, outside = folders

    def probe() -> list[bool]:
        return [
            succeeds((readable / "file").read_text),
            succeeds(lambda: (readable / "file").write_text("x")),
            succeeds((writable / "file").read_text),
            succeeds(lambda: (writable / "new").write_text("x")),
            succeeds((outside / "file").read_text),
            succeeds(lambda: list(outside.iterdir())),
        ]

    assert [True, False, True, True, False, False] == run_restricted(probe, [readable], [writable], abi)


def test_a_writable_folder_allows_changes_of_files(run_restricted, folders) -> None:
    """Files and folders inside can be created, renamed, truncated and removed."""
    _, writable, _ = folders

    def probe() -> list[bool]:
        os.chdir(writable)
        return [
            succeeds(lambda: os.truncate("file", 1)),
            succeeds(lambda: os.mkdir("folder")),
            succeeds(lambda: os.rename("file", "folder/file")),
            succeeds(lambda: os.symlink("/", "link")),
            succeeds(lambda: os.mkfifo("pipe")),
            succeeds(lambda: os.unlink("folder/file")),
            succeeds(lambda: os.rmdir("folder")),
        ]

    assert [True] * 7 == run_restricted(probe, [], [writable], abi=3)


def test_a_writable_folder_allows_no_special_files(run_restricted, folders) -> None:
    """Programs and scripts inside cannot be executed, and no socket or device can be created."""
    _, writable, _ = folders
    (writable / "script").write_text("#!/bin/sh\n")
    (writable / "script").chmod(0o755)

    def bind() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket")

    def probe() -> list[bool]:
        os.chdir(writable)
        return [
            succeeds(lambda: os.execv("script", ["script"])),
            succeeds(bind),
            succeeds(lambda: os.mknod("device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))),
        ]

    assert [False] * 3 == run_restricted(probe, [], [writable])


def test_links_and_parents_lead_nowhere(run_restricted, folders) -> None:
    """A link inside, or a path with `..`, gives no access to a file outside."""
    _, writable, outside = folders
    (writable / "link").symlink_to(outside / "file")

    def probe() -> list[bool]:
        os.chdir(writable)
        return [
            succeeds(lambda: Path("link").read_text()),
            succeeds(lambda: Path("../outside/file").read_text()),
            succeeds(lambda: os.link("../outside/file", "stolen")),
            succeeds(lambda: os.rename("../outside/file", "stolen")),
        ]

    assert [False] * 4 == run_restricted(probe, [], [writable])


def test_tcp_is_refused_from_abi_4_on(run_restricted, folders) -> None:
    """Binding and connecting fail with EACCES, although the ruleset has no rule for ports."""

    def probe() -> list[bool]:
        with socket.socket() as listener, socket.socket() as client:
            return [
                succeeds(lambda: listener.bind(("127.0.0.1", 0))),
                succeeds(lambda: client.connect(("127.0.0.1", 9))),
            ]

    assert [False, False] == run_restricted(probe, [], [folders[1]], abi=4)


def test_signals_to_other_processes_are_refused_from_abi_6_on(run_restricted, folders) -> None:
    """A restricted process can signal itself, not its parent."""

    def probe() -> list[bool]:
        return [succeeds(lambda: os.kill(os.getpid(), 0)), succeeds(lambda: os.kill(os.getppid(), 0))]

    assert [True, False] == run_restricted(probe, [], [folders[1]], abi=6)


def test_restrictions_only_accumulate(run_restricted, folders) -> None:
    """A second ruleset that allows everything gives nothing back."""
    _, writable, outside = folders

    def probe() -> bool:
        rules = landlock.open_path_rules([str(outside.parent)], writable=True)
        landlock.Ruleset(rules, 1).restrict_self(())
        return succeeds((outside / "file").read_text)

    assert run_restricted(probe, [], [writable]) is False
