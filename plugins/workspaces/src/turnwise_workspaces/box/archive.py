"""
Copies the folders that the agent can write to one file, and brings them back.

It runs in a child of the supervisor, as the agent's user and without privileges. The agent has made the trees, so
every name, depth, mode and kind of file may be there; no path through a link is followed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import struct
import uuid
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct(">I")
_CHUNK = 2**20
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK
_OWNER = 0o700


def use_archive(header: dict[str, Any], folders: list[str], fd: int) -> int:
    """Save folders to an archive, or restore them from it; the exit code of the process, with its reason."""
    try:
        if header["do"] == "snapshot":
            save(folders, fd)
        else:
            restore(folders, fd)
    except OSError as error:
        name = f": {error.filename[:200]!r}" if isinstance(error.filename, str) else ""
        os.write(2, f"{error.strerror}{name}".encode(errors="replace"))
        return 1
    return 0


# Save


def save(folders: list[str], fd: int) -> None:
    """
    Write the entries of folders, each as a header and its data.

    A process that still runs may change the folders meanwhile; what has gone is left out.
    """
    changed: list[tuple[str, int]] = []  # modes to give back
    seen: dict[tuple[int, int], str] = {}  # files with several names
    try:
        for folder in folders:
            waiting, device = [folder], os.lstat(folder).st_dev
            while waiting:
                path = waiting.pop()
                with contextlib.suppress(FileNotFoundError):
                    facts = os.lstat(path)
                    if facts.st_dev == device:  # not a mount in it, which is saved itself or cannot be written
                        waiting += save_entry(path, facts, fd, seen, changed)
    finally:
        for path, mode in reversed(changed):
            os.chmod(path, mode)


def save_entry(
    path: str, facts: os.stat_result, fd: int, seen: dict[tuple[int, int], str], changed: list[tuple[str, int]]
) -> list[str]:
    """Write an entry, and return the paths in it. Sockets are left out: nothing listens after a restoration."""
    mode = stat.S_IMODE(facts.st_mode)
    header: dict[str, object] = {"path": path, "mode": mode, "times": [facts.st_atime_ns, facts.st_mtime_ns]}
    key = (facts.st_dev, facts.st_ino)
    if stat.S_ISDIR(facts.st_mode):
        if mode & _OWNER != _OWNER:
            os.chmod(path, mode | _OWNER)
            changed.append((path, mode))
        names = os.listdir(path)
        write_header(fd, {**header, "kind": "folder"})
        return [f"{path}/{name}" for name in names]
    if stat.S_ISLNK(facts.st_mode):
        write_header(fd, {**header, "kind": "link", "target": os.readlink(path)})
    elif stat.S_ISFIFO(facts.st_mode):
        write_header(fd, {**header, "kind": "pipe"})
    elif stat.S_ISREG(facts.st_mode) and key in seen:
        write_header(fd, {**header, "kind": "name", "target": seen[key]})
    elif stat.S_ISREG(facts.st_mode):
        if facts.st_nlink > 1:
            seen[key] = path
        save_file(path, header, fd)
    return []


def save_file(path: str, header: dict[str, Any], fd: int) -> None:
    """Write a regular file, without its holes: one of a terabyte may have no byte of data."""
    mode = header["mode"]
    if not mode & stat.S_IRUSR:
        os.chmod(path, mode | stat.S_IRUSR)
    try:
        source = os.open(path, os.O_RDONLY | _OPEN)
    finally:
        if not mode & stat.S_IRUSR:
            os.chmod(path, mode)
    try:
        size = os.fstat(source).st_size
        parts = list(data_parts(source, size))
        write_header(fd, {**header, "kind": "file", "size": size, "parts": parts})
        for start, end in parts:
            while start < end:
                data = os.pread(source, min(_CHUNK, end - start), start) or bytes(min(_CHUNK, end - start))
                write_all(fd, data)
                start += len(data)
    finally:
        os.close(source)


def data_parts(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each part of a file that has data."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # the rest is a hole
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end


def write_header(fd: int, header: dict[str, Any]) -> None:
    """Write a header with its length. JSON keeps names that are no text, as Python decodes them."""
    text = json.dumps(header).encode()
    write_all(fd, _LENGTH.pack(len(text)) + text)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


# Restore


def restore(folders: list[str], fd: int) -> None:
    """Empty folders, and bring back what an archive has; no other process runs meanwhile."""
    mounts = mount_points()
    for folder in folders:
        clear(folder, mounts)
    os.lseek(fd, 0, os.SEEK_SET)
    made: list[dict[str, Any]] = []
    with os.fdopen(os.dup(fd), "rb") as file:
        while length := file.read(_LENGTH.size):
            header = json.loads(file.read(*_LENGTH.unpack(length)))
            make_entry(header, file)
            if header["kind"] == "folder":
                made.append(header)
    for header in reversed(made):  # at last, because their entries change their times, and may not be made otherwise
        os.chmod(header["path"], header["mode"])
        os.utime(header["path"], ns=tuple(header["times"]))


def make_entry(header: dict[str, Any], file: object) -> None:
    """Make an entry of an archive, and read its data."""
    path, kind = header["path"], header["kind"]
    if kind == "folder":
        with contextlib.suppress(FileExistsError):  # the folder itself, and one that holds a mount
            os.mkdir(path, _OWNER)
        return
    if kind == "name":
        os.link(header["target"], path)
        return
    if kind == "link":
        os.symlink(header["target"], path)
    elif kind == "pipe":
        os.mkfifo(path)
        os.chmod(path, header["mode"])
    else:
        make_file(header, file)
    os.utime(path, ns=tuple(header["times"]), follow_symlinks=False)


def make_file(header: dict[str, Any], file: Any) -> None:
    """Make a regular file with the data that follows its header."""
    fd = os.open(header["path"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
    try:
        os.ftruncate(fd, header["size"])
        for start, end in header["parts"]:
            os.lseek(fd, start, os.SEEK_SET)
            while start < end:
                data = file.read(min(_CHUNK, end - start))
                write_all(fd, data)
                start += len(data)
        os.fchmod(fd, header["mode"])
    finally:
        os.close(fd)


def mount_points() -> list[str]:
    """Return the paths of all mounts."""
    with open("/proc/self/mountinfo", "rb") as file:
        paths = [line.split()[4] for line in file]
    return [os.fsdecode(re.sub(rb"\\(\d{3})", lambda found: bytes([int(found[1], 8)]), path)) for path in paths]


def clear(folder: str, mounts: list[str]) -> None:
    """Remove everything in a folder but for mounts and the folders that hold them."""
    os.chmod(folder, _OWNER)
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        if path in mounts:
            continue
        if any(each.startswith(f"{path}/") for each in mounts):
            clear(path, mounts)
        else:
            remove(path, folder)


def remove(path: str, folder: str) -> None:
    """
    Remove a file or a tree.

    Folders of the tree come to its top before they are emptied. So a tree may be deeper than any path, and this
    function neither recurses nor keeps descriptors.
    """
    waiting = [path]
    while waiting:
        top = waiting.pop()
        if not stat.S_ISDIR(os.lstat(top).st_mode):
            os.unlink(top)
            continue
        os.chmod(top, _OWNER)
        for name in os.listdir(top):
            inner = f"{top}/{name}"
            if stat.S_ISDIR(os.lstat(inner).st_mode):
                os.chmod(inner, _OWNER)  # the one that moves must be writable
                moved = f"{folder}/{uuid.uuid4().hex}"
                os.rename(inner, moved)
                waiting.append(moved)
            else:
                os.unlink(inner)
        os.rmdir(top)
