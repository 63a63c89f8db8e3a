"""The reward `reported`: scores from outside, for example from a program that played the episode's agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen

from turnwise import Episode, Score
from turnwise.types import TrajectoryScore, TurnScore

REPORTED_SCORE: Final = "reported_score"
"""The key of `Episode.memory` for the scores."""


@frozen
class ReportedReward:
    """
    Returns the scores in ``episode.memory["reported_score"]``; without them the episode is not scored.

    They are a number for the episode, ``{"turns": [...]}`` with a number for each turn in the order in which the turns
    were appended, or ``{"records": [...]}`` with a number for each record.
    """

    def score(self, episode: Episode) -> Sequence[Score]:
        """
        Return a score for each record, or none.

        The number for the episode lies on its last record that is trained, so that the episode's reward is that number.

        Raises:
            ValueError: the scores have another form, or there is not one for each turn or record.
        """
        reported, num_records = episode.memory.get(REPORTED_SCORE), len(episode.trajectories)
        if reported is None:
            return ()
        if isinstance(reported, Mapping) and len(reported) == 1:
            [(kind, listed)] = reported.items()
            if kind == "records" and isinstance(listed, list):
                return [TrajectoryScore(value=value) for value in _check_values(listed, num_records, kind)]
            if kind == "turns" and isinstance(listed, list):
                records = episode.turn_records
                values = list(zip(records, _check_values(listed, len(records), kind), strict=True))
                return [TurnScore(values=tuple(v for r, v in values if r == number)) for number in range(num_records)]
        elif not isinstance(reported, Mapping):
            [value] = _check_values([reported], 1, "episodes")
            trained = [number for number, line in enumerate(episode.lineage) if line.trained]
            last = trained[-1] if trained else num_records - 1
            return [TrajectoryScore(value=value if number == last else 0.0) for number in range(num_records)]
        raise ValueError(f"the reported score must be a number, or have one list 'turns' or 'records': {reported!r}")


def _check_values(values: Sequence[object], expected: int, kind: str) -> list[float]:
    """Return numbers; the driver refuses infinities and NaN."""
    if len(values) != expected:
        raise ValueError(f"{len(values)} scores were reported for {expected} {kind}")
    checked = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(checked) != expected:
        raise ValueError(f"a reported score is not a number: {values!r}")
    return checked
