"""The channels of a `ReplicaPool` to its replicas, which are opened again after faults of the network."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import structlog
from attrs import define, field

from turnwise.errors import describe
from turnwise.runtime.remote.channel import BrokenChannelError, Channel, ChannelAddress, open_channel
from turnwise.runtime.remote.replica_pool import ReplicaPool

_RETRY_S: Final = 0.2
_UNREACHABLE_S: Final = 10.0
"""Seconds without a channel after which requests move to other replicas. The driver tells of a death much sooner."""

_MAX_BROKEN: Final = 5
"""Channels that break one after the other, before the replica counts as dead for this worker."""

_HEALTHY_S: Final = 60.0
"""Age in seconds from which a channel has worked: its end starts a new count of broken channels."""


@define(eq=False)
class ReplicaLinks:
    """
    Connects a pool to its replicas.

    The end of a channel does not tell whether the replica has died. If it has, the driver says so, and the requests
    count its death. If it lives, the channel is opened again, and the requests of the old one run again without blame.
    If messages break one channel after the other, a request is to blame, and the replica counts as dead here.
    """

    pool: ReplicaPool
    name: str
    _tasks: dict[int, asyncio.Task[None]] = field(factory=dict, init=False)
    _opened: dict[int, asyncio.Event] = field(factory=dict, init=False)
    _retired: set[int] = field(factory=set, init=False)

    def replica_up(self, index: int, address: ChannelAddress) -> None:
        """Connect to a new or restarted replica, until `replica_down`."""
        self._hang_up(index)
        opened = self._opened[index] = asyncio.Event()
        self._tasks[index] = asyncio.get_running_loop().create_task(self._stay_connected(index, address, opened))

    def replica_down(self, index: int, reason: str, *, left: bool = False) -> None:
        """Disconnect from a dead replica, or from one that has `left`."""
        self._hang_up(index)
        self.pool.replica_down(index, reason, left=left)

    async def retire(self, index: int) -> None:
        """Send a replica no more requests, and wait until its own have ended or `replica_down` moves them."""
        self._retired.add(index)
        await self.pool.retire(index)

    async def wait_until_opened(self) -> None:
        """Wait for the first attempt to connect to every replica that is known now."""
        for opened in tuple(self._opened.values()):
            await opened.wait()

    def _hang_up(self, index: int) -> None:
        self._retired.discard(index)
        if task := self._tasks.pop(index, None):
            task.cancel()
            self._opened.pop(index).set()

    async def _stay_connected(self, index: int, address: ChannelAddress, opened: asyncio.Event) -> None:
        loop, reason, connected, num_broken = asyncio.get_running_loop(), "", False, 0
        lost_at = loop.time()
        while num_broken < _MAX_BROKEN:
            try:
                channel = await self._open(index, address)
            except (OSError, EOFError) as error:
                reason = f"it cannot be reached: {describe(error)}"
            else:
                if connected:
                    self.pool.replica_down(index, reason, left=True)
                connected, opened_at = True, loop.time()
                self.pool.replica_up(index, channel.send)
                opened.set()
                reason, broken = await self._receive(index, channel)
                lost_at = loop.time()
                num_broken = num_broken * (lost_at - opened_at < _HEALTHY_S) + broken
            opened.set()
            if connected and (index in self._retired or loop.time() - lost_at > _UNREACHABLE_S):
                connected = False
                self.pool.replica_down(index, reason, left=True)
            if index in self._retired:
                return
            await asyncio.sleep(_RETRY_S)
        structlog.get_logger().error("replica given up by this worker", replica=index, channels=num_broken)
        self.pool.replica_down(index, f"{num_broken} channels to it broke, the last one because {reason}")

    async def _open(self, index: int, address: ChannelAddress) -> Channel:
        channel = await open_channel(address, self.name)
        if index in self._retired:  # meanwhile; no new request may reach it
            await channel.close()
            raise ConnectionAbortedError("it is retired")
        return channel

    async def _receive(self, index: int, channel: Channel) -> tuple[str, bool]:
        """Handle messages until the channel ends, and return the reason, and whether a message broke it."""
        try:
            await channel.receive_all(partial(self.pool.receive, index))
        except BrokenChannelError as error:
            structlog.get_logger().warning("channel opened again", replica=index, reason=str(error))
            return str(error), True
        finally:
            await channel.close()
        return "its channel was closed", False
