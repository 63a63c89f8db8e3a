"""Groups: the episodes of one task at one step."""

from __future__ import annotations

from itertools import compress

from attrs import define, field

from turnwise import EpisodeResult

GroupKey = tuple[str, int, bool]
"""Task uid, training step, and whether it is a validation."""


@define(eq=False)
class EpisodeGroup:
    """
    The episodes of one task at one step, in the order of their `rollout_n`.

    Attributes:
        episodes: all episodes of the group.
        dropped: whether the buffer dropped the group because it was too stale.
    """

    episodes: tuple[EpisodeResult, ...]
    dropped: bool = field(default=False, init=False)

    @property
    def key(self) -> GroupKey:
        """Task uid, training step, and whether it is a validation."""
        return group_key(self.episodes[0])

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled one of its tokens; None if no token was sampled."""
        versions = [
            int(record.weight_versions[record.response_mask == 1].min())
            for episode in self.episodes
            for record in compress(episode.trajectories, episode.trained)
            if record.response_mask.any()
        ]
        return min(versions, default=None)

    @property
    def has_variance(self) -> bool:
        """Whether its rewards differ; if not, a group baseline makes all advantages 0."""
        rewards = {episode.reward for episode in self.episodes if episode.reward is not None and episode.trainable}
        return len(rewards) > 1


def group_key(episode: EpisodeResult) -> GroupKey:
    """Return the key of the group of an episode."""
    return episode.task.uid, episode.global_step, episode.validation
