"""
Snapshots of containers.

What lies in memory is kept as an archive, which `tar` in the container makes. It is a file of this process without a
name, so that it ends with the process. What lies on the disk is kept as an image of the engine, which `reap` knows by
its label.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import IO, Final

from attrs import define, field, frozen

from turnwise.errors import InfrastructureError
from turnwise_workspaces.engine_command import Collected, ask_engine, communicate, start_program
from turnwise_workspaces.ownership import LABEL, read_owner, this_process
from turnwise_workspaces.workspace import Orphan, WorkspaceFileError

_REPOSITORY: Final = "localhost/turnwise-snapshot"
_NOT_FOUND: Final = "127"
_SAVE: Final = """
kill -STOP -1 2>/dev/null
limit=$1; shift
{ tar -c -f - -C / "$@"; echo "code $?" >&2; } | head -c "$limit"
kill -CONT -1 2>/dev/null
"""
CONTINUE: Final = "kill -CONT -1"
"""Text for a shell of a container whose processes pause."""
_OVERHEAD: Final = 16 * 2**20
"""Bytes of an archive besides the data: half a kibibyte for each file, and padding."""


@frozen
class Kept:
    """
    What is kept of a container.

    Attributes:
        image: of a container that brings it back.
        archive: of the folders in memory; None if all is in the image.
    """

    image: str
    archive: IO[bytes] | None = None


def archive_limit(folders: Sequence[str], disk_mb: int) -> int:
    """Return the most bytes that an archive of folders in memory may have."""
    return len(folders) * disk_mb * 2**20 + _OVERHEAD


def save_command(folders: Sequence[str], limit: int) -> tuple[str, ...]:
    """Return the command that writes an archive of folders, and pauses the processes of the container meanwhile."""
    return ("/bin/sh", "-c", _SAVE, "snapshot", str(limit), *(f".{folder}" for folder in folders))


@define(eq=False)
class Archived(Collected):
    """
    Output of a program that goes to a file, and the beginning of its errors.

    Attributes:
        file: gets the standard output.
        limit: bytes of the output from which on it is not whole.
        size: bytes of the file.
    """

    file: IO[bytes] = field(kw_only=True)
    limit: int = field(kw_only=True)
    size: int = field(default=0, init=False)

    async def read(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        if into is not self.stdout:
            await super().read(stream, into)
            return
        while data := await stream.read(2**20):
            self.file.write(data)
            self.size += len(data)
        self.file.flush()

    def check(self) -> None:
        """
        Check that the archive is whole.

        Raises:
            WorkspaceFileError: it is not, by what the agent left.
            InfrastructureError: the image has no `tar`.
        """
        lines = self.stderr.decode(errors="replace").strip().splitlines() or ["it took too long, or was killed"]
        if self.size >= self.limit:
            raise WorkspaceFileError(f"Error: the files cannot be copied: more than {self.limit // 2**20} MiB")
        if f"code {_NOT_FOUND}" in lines:
            raise InfrastructureError("the image has no `tar`, which snapshots need with `disk: tmpfs`")
        if "code 0" not in lines:
            raise WorkspaceFileError(f"Error: the files cannot be copied: {lines[0]}")


async def load_archive(command: Sequence[str], name: str, file: IO[bytes]) -> None:
    """
    Bring back an archive in a new container.

    Raises:
        InfrastructureError: it cannot be brought back.
    """
    file.seek(0)
    collected = Collected(2**16)
    arguments = [*command, "exec", "-i", name, "tar", "-x", "-p", "-f", "-", "-C", "/"]
    code = await communicate(await start_program(arguments, with_input=False, source=file), collected)
    if code != 0:
        lines = collected.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
        raise InfrastructureError(f"the files of a snapshot cannot be brought back: {lines[-1]}")


def new_image() -> str:
    """Return the name of an image that does not exist."""
    return f"{_REPOSITORY}:{uuid.uuid4().hex}"


async def save_image(command: Sequence[str], name: str, image: str, limit: int) -> None:
    """
    Keep the files of a container as an image, and pause its processes meanwhile.

    Raises:
        WorkspaceFileError: files that are not in the container's image have more bytes than the limit. Holes count,
            which an engine fills when it copies them.
    """
    size = int(await ask_engine([*command, "inspect", "--size", "--format", "{{.SizeRw}}", name]))
    if size > limit:
        raise WorkspaceFileError(f"Error: the files cannot be copied: more than {limit // 2**20} MiB")
    label = f"LABEL {LABEL}={this_process()}"
    await ask_engine([*command, "commit", "--pause=true", "--change", label, name, image])


async def remove_images(command: Sequence[str], images: Sequence[str]) -> None:
    """
    Remove images, the latest first because it may be made of the ones before. An image that is gone is no failure.

    Raises:
        InfrastructureError: one cannot be removed.
    """
    for image in reversed(images):
        try:
            await ask_engine([*command, "rmi", "-f", image])
        except InfrastructureError:
            if image in await list_images(command):
                raise


async def list_images(command: Sequence[str]) -> list[str]:
    """
    Return the images that are snapshots, of all processes of this machine.

    One that has lost its name is there by its id: docker takes the name alone if a container still has the image.
    """
    form = "{{.Repository}}:{{.Tag}}\t{{.ID}}"
    arguments = ("images", "--no-trunc", "--filter", f"label={LABEL}", "--format", form)
    pairs = [line.split("\t") for line in (await ask_engine([*command, *arguments])).splitlines()]
    return list(filter(is_image, (key if name.startswith("<none>:") else name for name, key in pairs)))


async def find_left_images(command: Sequence[str]) -> list[Orphan]:
    """Return the snapshots of processes that are gone."""
    found = []
    form = f'{{{{index .Config.Labels "{LABEL}"}}}}'
    for image in await list_images(command):
        with contextlib.suppress(InfrastructureError):  # it has been removed meanwhile
            label = (await ask_engine([*command, "inspect", "--type", "image", "--format", form, image])).strip()
            if (owner := read_owner(label)) is not None and owner.is_gone:
                found.append(Orphan(name=image, owner=label))
    return found


def is_image(name: str) -> bool:
    """Return whether something that was left is an image."""
    return name.startswith((f"{_REPOSITORY}:", "sha256:"))
