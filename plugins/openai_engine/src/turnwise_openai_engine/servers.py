"""Which of the servers a request goes to: that of its trajectory while it lives, else the one with the least to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from attrs import define, field

_MOST_REMEMBERED = 100_000
"""Trajectories whose server is remembered: nobody tells an engine that one has ended."""


@define(eq=False)
class Server:
    """
    One server.

    Attributes:
        url: without a path.
        healthy: it answered last time.
        num_requests: in flight to it.
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
    _homes: OrderedDict[str, Server] = field(factory=OrderedDict, init=False)

    @classmethod
    def of(cls, urls: Iterable[str]) -> Servers:
        """Return servers that nobody has looked at yet."""
        return cls(tuple(Server(url) for url in urls))

    def choose(self, trajectory_id: str, avoid: Iterable[Server] = ()) -> Server:
        """
        Return where a request of a trajectory goes, and remember it.

        Args:
            trajectory_id: what stands before a slash counts: paths of an episode share a prefix.
            avoid: servers that have just failed it; used when there is no other.
        """
        name, avoided = trajectory_id.partition("/")[0], set(map(id, avoid))
        home = self._homes.get(name)
        if home is None or not home.healthy or id(home) in avoided:
            home = min(
                self.all,
                key=lambda each: (not each.healthy, id(each) in avoided, each.num_tokens, each.num_requests),
            )
        self._homes[name] = home
        self._homes.move_to_end(name)
        if len(self._homes) > _MOST_REMEMBERED:
            self._homes.popitem(last=False)
        return home
