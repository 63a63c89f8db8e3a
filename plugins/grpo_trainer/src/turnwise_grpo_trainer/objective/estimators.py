"""
The estimators of advantages that the trainer registers.

This module imports no torch, because commands build an estimator to check a config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from turnwise_grpo_trainer.objective.hooks import Advantages

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise_grpo_trainer.config import AlgorithmConfig
    from turnwise_grpo_trainer.objective.timeline import Timeline


@frozen
class Grpo:
    """`advantages.grpo`, with the division by the group's standard deviation (`grpo`) or without (`dr_grpo`)."""

    norm_adv_by_std: bool

    def estimate(self, *, rewards: Tensor, groups: Tensor, valid: Tensor, **_more: object) -> Tensor:
        from turnwise_grpo_trainer.objective.advantages import grpo

        return grpo(rewards, groups, valid, norm_adv_by_std=self.norm_adv_by_std)


@frozen
class Rloo:
    """`advantages.rloo`."""

    def estimate(self, *, rewards: Tensor, groups: Tensor, valid: Tensor, **_more: object) -> Tensor:
        from turnwise_grpo_trainer.objective.advantages import rloo

        return rloo(rewards, groups, valid)


@frozen
class ReinforcePlusPlus:
    """`advantages.reinforce_plus_plus`; the rows of an episode follow each other in time."""

    def estimate(
        self, *, token_rewards: Tensor, mask: Tensor, timeline: Timeline, algorithm: AlgorithmConfig, **_more: object
    ) -> Tensor:
        from turnwise_grpo_trainer.objective.advantages import reinforce_plus_plus

        rewards, acted = timeline.join(token_rewards), timeline.join(mask)
        return timeline.split(reinforce_plus_plus(rewards, acted, algorithm.gamma))


@frozen
class Gae:
    """`advantages.gae`; the rows of an episode follow each other in time."""

    def estimate(
        self,
        *,
        token_rewards: Tensor,
        mask: Tensor,
        timeline: Timeline,
        algorithm: AlgorithmConfig,
        values: Tensor | None = None,
        **_more: object,
    ) -> Advantages:
        """Return the advantages and the critic's targets; `ValueError` without the critic's values."""
        from turnwise_grpo_trainer.objective.advantages import gae, whiten

        if values is None:
            raise ValueError("the estimator gae needs the critic's values")
        rewards, acted = timeline.join(token_rewards), timeline.join(mask)
        found, returns = gae(rewards, timeline.join(values), acted, gamma=algorithm.gamma, lam=algorithm.lam)
        found = whiten(found, acted) if algorithm.norm_adv else found
        return Advantages(timeline.split(found), timeline.split(returns))


OWN_ESTIMATORS: dict[str, Grpo | Rloo | ReinforcePlusPlus | Gae] = {
    "grpo": Grpo(norm_adv_by_std=True),
    "dr_grpo": Grpo(norm_adv_by_std=False),
    "rloo": Rloo(),
    "reinforce_plus_plus": ReinforcePlusPlus(),
    "gae": Gae(),
}
"""The estimators by the name in the config; they have no options."""
