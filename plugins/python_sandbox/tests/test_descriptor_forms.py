"""Changes of modes, lengths and times through descriptors: the results and errors that the paths would give."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise_python_sandbox.box import descriptor_forms


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs the functions until the end of the test."""
    for name in ("chmod", "truncate", "utime"):
        # Restores the function that is there now.
        monkeypatch.setattr(os, name, getattr(os, name))
    return descriptor_forms.install


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with mode 0644."""
    made = tmp_path / "file"
    made.write_text("content")
    made.chmod(0o644)
    return made


def mode_of(path: Path) -> int:
    """Return the permissions of a file."""
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("convert", [str, os.fsencode, Path])
def test_modes_change_by_every_kind_of_path(install, file: Path, convert: Callable[[str], object]) -> None:
    """Text, bytes and path objects name the file."""
    install(dedicated_user=True)
    os.chmod(convert(str(file)), 0o600)

    assert mode_of(file) == 0o600


def test_modes_change_by_descriptor_and_within_a_directory(install, file: Path) -> None:
    """`os.chmod` takes a descriptor, and a directory that the path is relative to."""
    install(dedicated_user=True)
    with file.open() as opened:
        os.chmod(opened.fileno(), 0o600)
    first = mode_of(file)
    directory = os.open(file.parent, os.O_RDONLY)
    os.chmod(file.name, 0o640, dir_fd=directory)
    os.close(directory)

    assert (first, mode_of(file)) == (0o600, 0o640)


def test_a_mode_that_is_there_needs_no_change(install, file: Path, monkeypatch) -> None:
    """A copy with the mode of its source works also where the filter refuses every change of a mode."""

    def refuse(*_arguments: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    install(dedicated_user=False)
    os.chmod(file, 0o644)

    with pytest.raises(PermissionError, match=rf"^\[Errno 1\] Operation not permitted: '{file}'$"):
        os.chmod(str(file), 0o600)


def test_lengths_change(install, file: Path) -> None:
    """By path and by descriptor."""
    install(dedicated_user=True)
    os.truncate(file, 4)
    by_path = file.read_text()
    with file.open("r+") as opened:
        os.truncate(opened.fileno(), 2)

    assert ("cont", "co") == (by_path, file.read_text())


def test_times_change(install, file: Path) -> None:
    """Seconds, nanoseconds and the present, by path and by descriptor."""
    install(dedicated_user=True)
    os.utime(file, (1, 2))
    seconds = file.stat().st_mtime_ns
    os.utime(file, ns=(3, 4))
    nanoseconds = file.stat().st_mtime_ns
    with file.open() as opened:
        os.utime(opened.fileno(), (5, 6))
    by_descriptor = file.stat().st_mtime_ns
    os.utime(file)

    assert (2 * 10**9, 4, 6 * 10**9) == (seconds, nanoseconds, by_descriptor)
    assert file.stat().st_mtime_ns > 10**18


def test_the_times_of_a_link_stay(install, file: Path) -> None:
    """A link itself cannot be opened, so that its times, and those of its target, are left."""
    link = file.with_name("link")
    link.symlink_to(file)
    before = (link.lstat().st_mtime_ns, file.stat().st_mtime_ns)
    install(dedicated_user=True)
    os.utime(link, (1, 1), follow_symlinks=False)
    untouched = (link.lstat().st_mtime_ns, file.stat().st_mtime_ns)
    os.utime(link, (1, 1))

    assert before == untouched
    assert file.stat().st_mtime_ns == 10**9


def test_a_link_has_no_mode(install, file: Path) -> None:
    """Linux cannot change it, and the error is Python's own."""
    link = file.with_name("link")
    link.symlink_to(file)
    install(dedicated_user=True)

    with pytest.raises(NotImplementedError, match="follow_symlinks"):
        os.chmod(link, 0o600, follow_symlinks=False)
    assert mode_of(file) == 0o644


@pytest.mark.parametrize("dedicated_user", [True, False])
def test_a_refused_time_is_an_error_of_a_dedicated_user_only(
    install, file: Path, monkeypatch, dedicated_user: bool
) -> None:
    """Where the filter refuses every change of times, copies keep working; elsewhere the kernel's error is shown."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    install(dedicated_user=dedicated_user)

    if dedicated_user:
        with pytest.raises(PermissionError, match="not permitted"):
            os.utime(file, (1, 1))
    else:
        os.utime(file, (1, 1))


@pytest.mark.parametrize(
    "action", [lambda: os.chmod("none", 0o600), lambda: os.utime("none"), lambda: os.truncate("none", 1)]
)
def test_a_missing_file_is_python_s_own_error(install, tmp_path, monkeypatch, action: Callable[[], None]) -> None:
    """The text names the path as the program wrote it."""
    monkeypatch.chdir(tmp_path)
    install(dedicated_user=False)

    with pytest.raises(FileNotFoundError, match=r"^\[Errno 2\] No such file or directory: 'none'$"):
        action()


def test_a_pipe_does_not_block(install, tmp_path) -> None:
    """The mode of a named pipe changes although no process writes to it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    install(dedicated_user=True)
    os.chmod(pipe, 0o640)

    assert mode_of(pipe) == 0o640


@pytest.mark.own_process
def test_no_descriptor_is_left(install, file: Path) -> None:
    """Every call closes its descriptor, also after an error."""
    install(dedicated_user=True)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        os.chmod(file, 0o600)
        os.utime(file)
        os.truncate(file, 1)
        with pytest.raises(FileNotFoundError):
            os.utime("/none")

    assert before == len(os.listdir("/proc/self/fd"))


def test_a_traceback_ends_with_the_line_of_the_program(sandbox) -> None:
    """No frame of these functions is shown, so that both tiers print the same."""
    result = sandbox.run("import os\nos.chmod('none', 0o600)")

    assert (
        "Traceback (most recent call last):\n  File \"main.py\", line 2, in <module>\n    os.chmod('none', 0o600)\n"
        "FileNotFoundError: [Errno 2] No such file or directory: 'none'\n"
    ) == result.stderr
