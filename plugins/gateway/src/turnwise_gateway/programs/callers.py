"""
Tells whether a connection comes from a process of a session's program.

Programs of one user can read each other's environment, and with it the keys of their sessions. A bound key is of use
only to the program that it was given to: the socket of each new connection must belong to one of its processes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import cache
from typing import Final

import structlog
from attrs import define, field

from turnwise import Episode
from turnwise.threads import in_thread
from turnwise_gateway.programs.peer_socket import Address, SocketFinder
from turnwise_gateway.programs.processes import (
    Process,
    find_owners,
    find_session,
    find_tree,
    list_processes,
    read_process,
)

_MAX_KNOWN: Final = 4


@define(eq=False)
class ProcessCensus:
    """
    The processes of the machine; programs whose callers are looked for at the same time share a look at all of them.

    Attributes:
        sockets: finds the sockets of callers.
    """

    sockets: SocketFinder = field(factory=SocketFinder)
    _turn: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _begun: float = field(default=float("-inf"), init=False)
    _processes: dict[int, Process] = field(factory=dict, init=False)

    async def take(self) -> dict[int, Process]:
        """Return the processes that there are now."""
        asked = time.monotonic()
        async with self._turn:
            if self._begun < asked:
                begun = time.monotonic()
                self._processes = await in_thread(list_processes, {})
                self._begun = begun
            return self._processes


@define(eq=False)
class ProgramCallers:
    """
    The processes of a program that call the model.

    Attributes:
        session: name of the session, for the log.
        census: of the machine.
    """

    session: str
    census: ProcessCensus
    _num_foreign: int = field(default=0, init=False)
    _program: asyncio.Future[tuple[int, str]] = field(
        factory=lambda: asyncio.get_running_loop().create_future(), init=False
    )
    _callers: set[tuple[int, int]] = field(factory=set, init=False)
    _known: deque[tuple[int, Process]] = field(factory=lambda: deque(maxlen=_MAX_KNOWN), init=False)
    _asked: set[int] = field(factory=set, init=False)
    _owners: dict[int, int | None] = field(factory=dict, init=False)
    _turn: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    def count(self, episode: Episode) -> None:
        """Add the processes that called the model, and the refused connections of others, to the metrics."""
        episode.record_metric("gateway/callers", len(self._callers))
        if self._num_foreign:
            episode.record_metric("gateway/foreign_callers", self._num_foreign)

    def begin(self, pid: int, mark: str) -> None:
        """Say which process the program is, and the mark of its children; connections wait for that."""
        self._program.set_result((pid, mark))

    async def admits(self, client: Address, server: Address) -> bool:
        """
        Return whether a connection comes from a process of the program.

        Args:
            client: address of the client, which is on this machine.
            server: address of the accepted socket.

        Raises:
            OSError: the process or the system has no descriptor for the look.
        """
        inode = self.census.sockets.find_inode(client, server)
        if inode == 0:
            return False  # nobody is there to read the answer
        program = await asyncio.shield(self._program)
        self._asked.add(inode)
        try:
            async with self._turn:  # a session has one thread at most, which looks for all connections that wait
                if inode not in self._owners:
                    self._owners |= await self._find(*program, frozenset(self._asked))
                owner = self._owners[inode]
        except PermissionError:
            _warn_of_other_users()
            return True
        finally:
            self._asked.discard(inode)
            self._owners.pop(inode, None)
        if owner is None:
            self._note_foreign()
        return owner is not None

    async def _find(self, leader: int, mark: str, inodes: frozenset[int]) -> dict[int, int | None]:
        """Return the process of the program that has each socket: of most programs, it is the first or a known one."""
        likely = [leader, *(pid for pid, process in self._known if read_process(pid) == process)]
        found = await in_thread(find_owners, {"pids": likely, "inodes": inodes})
        if missing := inodes - found.keys():
            found |= await in_thread(lambda: find_owners(find_session(leader), missing), {})
        if missing := inodes - found.keys():
            tree = find_tree(await self.census.take(), leader, mark)
            found |= await in_thread(find_owners, {"pids": tree, "inodes": missing})
        for pid in set(found.values()):
            process = read_process(pid)
            if process is not None and (pid, process.started) not in self._callers:
                self._callers.add((pid, process.started))
                self._known.append((pid, process))
        return {inode: found.get(inode) for inode in inodes}

    def _note_foreign(self) -> None:
        self._num_foreign += 1
        if self._num_foreign == 1:
            structlog.get_logger().warning(
                "a process that is none of an agent's program called with its key, and is refused; "
                "`bind_keys: false` lets proxies and containers call",
                session=self.session,
            )


@cache
def _warn_of_other_users() -> None:
    structlog.get_logger().warning(
        "programs of agents have processes of other users, so their keys are not bound to them"
    )
