"""The connections that wait for a request: above a bound, the oldest are closed."""

from __future__ import annotations

from typing import Final, Protocol

from attrs import define, field

_MOST: Final = 1024
_SHARE: Final = 8


class Closable(Protocol):
    """A connection."""

    def force_close(self) -> None:
        """Close it at once."""


def bound_of(num_descriptors: int) -> int:
    """Return the most connections that may wait at a port of a process with this number of descriptors."""
    return max(1, min(_MOST, num_descriptors // _SHARE))


@define(eq=False)
class WaitingConnections:
    """
    The connections of a port on which no request is being answered.

    Attributes:
        most: that may wait. A client that sends its request at once does not wait, so the bound concerns idle ones.
    """

    most: int
    _strangers: dict[Closable, None] = field(factory=dict, init=False)
    _known: dict[Closable, None] = field(factory=dict, init=False)

    def add(self, connection: Closable, *, is_known: bool) -> None:
        """Let a connection wait; close the oldest without a proved key above the bound, or else the oldest."""
        if len(self._strangers) + len(self._known) >= self.most:
            oldest = next(iter(self._strangers or self._known))
            self.remove(oldest)
            oldest.force_close()
        (self._known if is_known else self._strangers)[connection] = None

    def remove(self, connection: Closable) -> None:
        """Forget a connection that has a request, or has ended."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)
