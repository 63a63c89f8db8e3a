"""Slots of a machine: a bound on the workspaces of all processes at once, which a killed process does not keep."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from pathlib import Path
from typing import Final

from attrs import define, field

from turnwise.errors import ConfigError, InfrastructureError

_POLL_S: Final = 0.02


def open_state(folder: Path) -> Path:
    """
    Make the folder of the slots, and return it.

    Raises:
        ConfigError: it cannot be made, or another user has it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or folder.is_symlink():
            raise ConfigError(f"the state folder {folder} belongs to another user; set 'state'")
    except OSError as error:
        raise ConfigError(f"the state folder {folder} cannot be made: {error.strerror}; set 'state'") from error
    return folder


@define(eq=False)
class Slot:
    """A slot that is taken."""

    _fd: int

    def free(self) -> None:
        """Give the slot back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@define(eq=False)
class Slots:
    """
    A number of slots, one lock file each. The system frees those of a process that dies.

    Attributes:
        folder: of the files; processes with the same folder share the slots.
        number: of slots.
        wait_s: seconds that one may be waited for.
    """

    folder: Path
    number: int
    wait_s: float
    _waiting: deque[object] = field(factory=deque, init=False)

    async def take(self) -> Slot:
        """
        Wait for a slot; the calls of one process get theirs in order.

        Raises:
            InfrastructureError: none was free for `wait_s` seconds.
        """
        open_state(self.folder)
        # No lock of asyncio, which belongs to one loop: an object of a process may serve several.
        ticket = object()
        self._waiting.append(ticket)
        try:
            async with asyncio.timeout(self.wait_s):
                while self._waiting[0] is not ticket or (slot := self._try()) is None:  # noqa: ASYNC110 - of processes
                    await asyncio.sleep(_POLL_S)
                return slot
        except TimeoutError as error:
            text = f"no workspace was free for {self.wait_s:g} s: {self.number} are in use on this machine"
            raise InfrastructureError(text) from error
        finally:
            self._waiting.remove(ticket)

    def _try(self) -> Slot | None:
        for index in range(self.number):
            fd = os.open(self.folder / f"slot-{index}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
            else:
                return Slot(fd)
        return None
