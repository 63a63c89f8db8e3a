"""The middleware `shape_reward`: scales and bounds rewards, and gives turns a price."""

from __future__ import annotations

from attrs import evolve

from turnwise import Episode, Score, TrajectoryScore
from turnwise.record.result import total_score
from turnwise_middleware.config import ShapeRewardConfig
from turnwise_middleware.middleware import Middleware


class ShapeReward(Middleware):
    """
    Changes the sum of an episode's scores to `scale * sum - turn_price * turns`, within bounds.

    The difference lies on the last score of a whole record.
    """

    name = "shape_reward"
    config: ShapeRewardConfig

    async def after_reward(self, episode: Episode, scores: tuple[Score, ...]) -> tuple[Score, ...]:
        """Return the shaped scores; `TypeError` if no score is for a whole record."""
        if not scores:
            return scores
        config, total = self.config, sum(map(total_score, scores))
        num_priced = max(0, len(episode.turn_records) - config.free_turns)
        shaped = config.scale * total - config.turn_price * num_priced
        if config.least is not None:
            shaped = max(config.least, shaped)
        if config.most is not None:
            shaped = min(config.most, shaped)
        if shaped == total:
            return scores
        last = max((number for number, each in enumerate(scores) if isinstance(each, TrajectoryScore)), default=None)
        if last is None:
            raise TypeError(
                "shape_reward needs a score for a whole record, and the reward gives scores of turns or tokens"
            )
        changed = scores[last]
        assert isinstance(changed, TrajectoryScore)
        return (*scores[:last], evolve(changed, value=changed.value + shaped - total), *scores[last + 1 :])
