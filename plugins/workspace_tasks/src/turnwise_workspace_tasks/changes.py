"""Finds what an agent changed in the working folder: text for people, which decides nothing."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Final

from turnwise import Report
from turnwise_workspaces import Command, Workspace, WorkspaceFileError, WorkspaceSpec

_LIST_S: Final = 20.0
_MAX_LIST_BYTES: Final = 2**20
_MAX_FILE_BYTES: Final = 2**20
"""Larger files are not looked at."""
_MAX_SHOWN: Final = 20
_MAX_SHOWN_BYTES: Final = 2**16
# Not by the names that a shell would search: the agent may have put others there.
_LIST: Final = f"""
PATH=/bin:/usr/bin:/sbin:/usr/sbin; export PATH
find . -type f -size -{_MAX_FILE_BYTES // 512 + 1} -exec sha256sum {{}} +
"""


async def find_changes(workspace: Workspace, spec: WorkspaceSpec) -> Report:
    """
    Return the differences between the first files of a workspace and the present ones in its working folder.

    Files of an image that lie in the folder count as new ones, because nobody lists them at the start.

    Raises:
        InfrastructureError: the workspace is lost.
    """
    before = _files_in(spec)
    command = Command(argv=("/bin/sh", "-c", _LIST), timeout_s=_LIST_S, max_output_bytes=_MAX_LIST_BYTES)
    listed = await workspace.exec(command)
    if listed.timed_out or listed.truncated or listed.exit_code not in (0, 1):  # 1 is a file that cannot be read
        return Report(title="changed files", text="the files of the workspace could not be listed", failed=True)
    after = _read_sums(listed.stdout)
    changed = sorted(
        path
        for path in before.keys() | after.keys()
        if path not in after or path not in before or hashlib.sha256(before[path]).hexdigest() != after[path]
    )
    parts = []
    for path in changed[:_MAX_SHOWN]:
        new = await _read(workspace, path) if path in after else None
        parts.append("\n".join(_compare(path, before.get(path), new)))
    if len(changed) > _MAX_SHOWN:
        parts.append(f"… {len(changed) - _MAX_SHOWN} files more: {', '.join(changed[_MAX_SHOWN:][:_MAX_SHOWN])}")
    return Report(title="changed files", text="\n".join(parts), facts={"files": float(len(changed))})


def _files_in(spec: WorkspaceSpec) -> dict[str, bytes]:
    """Return the files of the working folder by their path in it, without files too large to compare."""
    inside = f"{spec.folder}/"
    found: Mapping[str, bytes] = {
        path.removeprefix(inside).removeprefix("./"): data
        for path, data in spec.files.items()
        if not path.startswith("/") or path.startswith(inside)
    }
    return {path: data for path, data in found.items() if len(data) <= _MAX_FILE_BYTES}


def _read_sums(output: bytes) -> dict[str, str]:
    """Return the sums of files by path; a name with a line break has an escaped line, and is left out."""
    found = {}
    for line in output.decode(errors="surrogateescape").splitlines():
        digest, mark, path = line.partition("  ./")
        if mark and len(digest) == hashlib.sha256().digest_size * 2:
            found[path] = digest
    return found


async def _read(workspace: Workspace, path: str) -> bytes | None:
    try:
        return await workspace.read(path, max_bytes=_MAX_SHOWN_BYTES)
    except WorkspaceFileError:
        return None


def _compare(path: str, before: bytes | None, after: bytes | None) -> Iterator[str]:
    """Yield the lines of a unified difference; of bytes that are no text, only their numbers."""
    texts = [None if data is None else _text(data) for data in (before, after)]
    if any(data is not None and text is None for data, text in zip((before, after), texts, strict=True)):
        sizes = ["nothing" if data is None else f"{len(data)} bytes" for data in (before, after)]
        yield f"{path}: {sizes[0]} became {sizes[1]}"
        return
    old, new = ((text or "").splitlines() for text in texts)
    old_name, new_name = ("/dev/null" if data is None else path for data in (before, after))
    yield from difflib.unified_diff(old, new, old_name, new_name, lineterm="")


def _text(data: bytes) -> str | None:
    try:
        return data[:_MAX_SHOWN_BYTES].decode()
    except UnicodeDecodeError:
        return None
