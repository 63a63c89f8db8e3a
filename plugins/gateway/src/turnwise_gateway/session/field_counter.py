"""Counts the fields of requests that have no effect, and the forms of a turn that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define, field

from turnwise import Episode
from turnwise_gateway.calls import ModelCall
from turnwise_gateway.session.grammars import is_constrained

_MAX_NAMES: Final = 64
"""Names that are counted one by one; a client may invent any number, and each is a metric of the episode."""


def count_metric(episode: Episode, name: str, number: float = 1) -> None:
    """Add to a metric of the gateway in an episode."""
    episode.record_metric(f"gateway/{name}", number)


@define(eq=False)
class FieldCounter:
    """
    Counts the fields of the calls of one session.

    Attributes:
        constrains: a grammar keeps turns to the form that a call asks for.
    """

    constrains: bool = False
    _names: set[str] = field(factory=set, init=False)

    def count(self, call: ModelCall, note: Callable[[str], None]) -> None:
        """Call `note` with a name for each field and form of a call; after many names of fields, it is `other`."""
        for name in (*call.requested_sampling, *call.ignored):
            if len(self._names) < _MAX_NAMES:
                self._names.add(name)
            note(f"ignored_{name if name in self._names else 'other'}")
        effect = "constrained" if self.constrains and is_constrained(call) else "wished"
        for name in {each.counted for each in call.constraints}:
            note(f"{effect}_{name}")
