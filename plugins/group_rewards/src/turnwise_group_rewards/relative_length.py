"""The group reward `relative_length`: among the answers to a task, shorter right ones score more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from turnwise import EpisodeResult
from turnwise_group_rewards.config import RelativeLengthConfig
from turnwise_rollout_buffer import GroupReward


class RelativeLength(GroupReward):
    """
    Adds a term for the length of an episode, relative to its group, to the score of the run's `reward`.

    The term is 0.5 for the fewest sampled tokens of a group and -0.5 for the most, linear between them, and 0 if all
    are equal; wrong answers get no bonus, only the penalty ("Kimi k1.5", arXiv:2501.12599, section 2.3.3).
    """

    config: RelativeLengthConfig

    def score_group(self, episodes: Sequence[EpisodeResult]) -> list[float]:
        """Return a score for each episode; `ValueError` if the run has no `reward`."""
        lengths = [_num_sampled(each) for each in episodes]
        least, most = min(lengths), max(lengths)
        scores = []
        for episode, length in zip(episodes, lengths, strict=True):
            if episode.reward is None:
                raise ValueError(f"episode {episode.uid} has no reward; relative_length needs a reward in the config")
            term = 0.5 - (length - least) / (most - least) if most > least else 0.0
            is_right = episode.reward > self.config.right_above
            scores.append(episode.reward + self.config.weight * (term if is_right else min(0.0, term)))
        return scores


def _num_sampled(episode: EpisodeResult) -> int:
    """Return the number of sampled tokens in the records that are trained."""
    return sum(int(record.response_mask.sum()) for record in compress(episode.trajectories, episode.trained))
