"""Episodes that have ended, and wait for the other members of their group."""

from __future__ import annotations

from attrs import frozen

from turnwise.record.result import EpisodeResult
from turnwise.record.spec import UnfinishedEpisode


@frozen(kw_only=True, eq=False)
class EndedEpisode(UnfinishedEpisode):
    """
    A member of an interrupted group that has ended. A resume delivers its result again, and runs nothing.

    Attributes:
        result: the episode as it ended, with its own scores and not with its group's.
    """

    result: EpisodeResult
