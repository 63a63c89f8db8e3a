"""Chooses the server of a request: its trajectory's server while it is healthy, else the one with the least load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from attrs import define, field

_MAX_TRAJECTORIES = 100_000
"""Most trajectories whose server is remembered, because an engine does not learn when one ends."""


@define(eq=False)
class Server:
    """
    One server.

    Attributes:
        url: without a path.
        healthy: result of the last health check.
        num_requests: requests in flight.
        num_tokens: context tokens of these.
        num_failures: since the start.
    """

    url: str
    healthy: bool = True
    num_requests: int = 0
    num_tokens: int = 0
    num_failures: int = 0


@define(eq=False)
class Servers:
    """
    All servers of an engine.

    Attributes:
        all: in the order of the config.
    """

    all: tuple[Server, ...]
    _assigned: OrderedDict[str, Server] = field(factory=OrderedDict, init=False)

    @classmethod
    def from_urls(cls, urls: Iterable[str]) -> Servers:
        """Return servers that have not been checked yet."""
        return cls(tuple(Server(url) for url in urls))

    def choose(self, trajectory_id: str, avoid: Iterable[Server] = ()) -> Server:
        """
        Return the server for a request of a trajectory, and remember it.

        Args:
            trajectory_id: only the part before a slash counts, because paths of an episode share a prefix.
            avoid: servers that have just failed the request; used if there are no others.
        """
        name, avoided = trajectory_id.partition("/")[0], set(map(id, avoid))
        server = self._assigned.get(name)
        if server is None or not server.healthy or id(server) in avoided:
            server = min(
                self.all,
                key=lambda each: (not each.healthy, id(each) in avoided, each.num_tokens, each.num_requests),
            )
        self._assigned[name] = server
        self._assigned.move_to_end(name)
        if len(self._assigned) > _MAX_TRAJECTORIES:
            self._assigned.popitem(last=False)
        return server
