"""
Serves `os.chmod`, `os.truncate` and `os.utime` through descriptors, for tier 2, whose filter refuses the paths.

Landlock governs what a program may open, but not whose mode and times it changes by path. A program that makes the
system call itself gains nothing from this module, which only keeps honest programs running.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import Any

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def install(*, dedicated_user: bool) -> None:
    """
    Replace the three functions in this process.

    Args:
        dedicated_user: the filter lets programs change the times of open files; otherwise `os.utime` leaves the times
            as they are, so that `shutil.copy2` and `shutil.copytree` work.
    """
    chmod, truncate, utime = os.chmod, os.truncate, os.utime

    @functools.wraps(chmod)
    def change_mode(path: Path | int, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        if isinstance(path, int) or not follow_symlinks:
            chmod(path, mode, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
            return
        with _opened(path, dir_fd) as fd:
            if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
                os.fchmod(fd, mode)

    @functools.wraps(truncate)
    def change_length(path: Path | int, length: int) -> None:
        if isinstance(path, int):
            truncate(path, length)
            return
        with _opened(path, None, os.O_WRONLY) as fd:
            os.ftruncate(fd, length)

    @functools.wraps(utime)
    def change_times(
        path: Path | int, times: Any = None, *, dir_fd: int | None = None, follow_symlinks: bool = True, **ns: Any
    ) -> None:
        refused = contextlib.nullcontext() if dedicated_user else contextlib.suppress(PermissionError)
        if isinstance(path, int):
            with refused:
                utime(path, times, **ns)
        elif follow_symlinks or not stat.S_ISLNK(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            with _opened(path, dir_fd) as fd, refused:
                utime(fd, times, **ns)

    os.chmod, os.truncate, os.utime = change_mode, change_length, change_times


@contextlib.contextmanager
def _opened(path: Path, dir_fd: int | None, *modes: int) -> Iterator[int]:
    """Open a path in the first mode that its permissions allow; errors name the path."""
    fd = _open(path, dir_fd, modes or (os.O_RDONLY, os.O_WRONLY))
    try:
        yield fd
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _open(path: Path, dir_fd: int | None, modes: tuple[int, ...]) -> int:
    # A pipe without a writer must not block.
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    for mode in modes[:-1]:
        with contextlib.suppress(PermissionError):
            return os.open(path, flags | mode, dir_fd=dir_fd)
    return os.open(path, flags | modes[-1], dir_fd=dir_fd)


def hide_frames(frames: TracebackType | None) -> None:
    """Remove the frames of this module, and of the context managers in it, from the end of a traceback."""
    while frames is not None:
        following = frames.tb_next
        if following is not None and following.tb_frame.f_code.co_filename == __file__:
            frames.tb_next = None
        frames = frames.tb_next
