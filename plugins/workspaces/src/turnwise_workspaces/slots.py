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
_WAITING: Final = "waiting"
"""Name of a file that a process locks while it waits for a slot."""


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
    """A slot that is taken: a locked file."""

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
        ticket, mark = object(), None
        self._waiting.append(ticket)
        try:
            async with asyncio.timeout(self.wait_s):
                while self._waiting[0] is not ticket or (slot := self._try()) is None:
                    # One process that waits has the mark, and the next one gets it when that one has a slot.
                    mark = mark or self._lock(_WAITING, fcntl.LOCK_EX)
                    await asyncio.sleep(_POLL_S)
                return slot
        except TimeoutError as error:
            text = f"no workspace was free for {self.wait_s:g} s: {self.number} are in use on this machine"
            raise InfrastructureError(text) from error
        finally:
            self._waiting.remove(ticket)
            if mark is not None:
                mark.free()

    def is_waited_for(self) -> bool:
        """Return whether anyone waits for a slot, in this process or another one."""
        if self._waiting:
            return True
        # Shared, so that two processes that look at once do not take each other for one that waits.
        mark = self._lock(_WAITING, fcntl.LOCK_SH)
        if mark is not None:
            mark.free()
        return mark is None

    def take_spare(self) -> Slot | None:
        """Return a slot if one is free and no episode waits for one."""
        open_state(self.folder)
        return None if self.is_waited_for() else self._try()

    def _try(self) -> Slot | None:
        for index in range(self.number):
            if (slot := self._lock(f"slot-{index}", fcntl.LOCK_EX)) is not None:
                return slot
        return None

    def _lock(self, name: str, how: int) -> Slot | None:
        """Return a locked file; None if another process, or another object of this one, has locked it."""
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return Slot(fd)
