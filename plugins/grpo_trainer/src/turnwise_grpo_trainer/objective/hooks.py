"""
The trainer's own hooks: losses and advantages that plugins register.

A plugin is found as for every other hook, by its entry point of the group ``turnwise``::

    @turnwise.hookimpl
    def register_losses(registry):
        registry.add("my_loss", MyLoss, config=MyLossConfig)

    @turnwise.hookimpl
    def register_advantages(registry):
        registry.add("my_advantage", make_my_advantage)

A config chooses them by `train.loss` and `train.algorithm.adv_estimator`, by name or as a section with options.
`turnwise_testing` has the suites `LossSuite` and `AdvantageSuite`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

import turnwise
from turnwise import Registry, Resources
from turnwise.types import PluginRecipe
from turnwise_grpo_trainer.objective.replays import Replay, build_replays

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.config.own_code import OwnCode
    from turnwise.plugin.host import Host
    from turnwise_grpo_trainer.config import AlgorithmConfig, TrainConfig
    from turnwise_grpo_trainer.objective.path_ratios import PathRatios
    from turnwise_grpo_trainer.objective.timeline import Timeline

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Estimators whose advantages are differences from the other rewards of a group."""


@runtime_checkable
class PolicyLoss(Protocol):
    """Turns the advantages of tokens into losses."""

    def compute(
        self,
        *,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rollout_log_probs: Tensor,
        advantages: Tensor,
        rows: Tensor,
        **more: Any,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """
        Return the losses of the tokens of a micro-batch, which has whole rows.

        All tensors are (M,), an entry for each token in the loss; others are not seen. The trainer weighs the losses by
        `loss_agg_mode` and adds them up, also over micro-batches. So a row's losses depend on this row alone.

        Args:
            log_probs: of the policy, the only input with a gradient.
            old_log_probs: of the policy before the update; in the first optimizer step they equal `log_probs`.
            rollout_log_probs: of the engine.
            advantages: of the tokens.
            rows: int64, the row of each token, in no particular order; a row is a trajectory, or an expanded path.
            more: inputs of a `ColumnLoss`; later versions may add others.

        Returns:
            (M,) losses to minimise; and (M,) values by name, whose means are logged as ``actor/NAME``. The names are
            the same for every micro-batch.
        """


@runtime_checkable
class ColumnLoss(Protocol):
    """
    A `PolicyLoss` that reads open columns of the batch, such as the log-probabilities of a teacher.

    `compute` then gets `columns`, (M, *shape) values by name. It gets every token in the loss, also in groups without
    an advantage, and metrics cover all of them.

    Attributes:
        columns: names of columns of response tokens. A training without one is refused, and so is a trained token whose
            value is not a number.
        ids_column: one of them with (M, K) token ids, whose log-probabilities `compute` gets as `id_log_probs`, (M, K),
            of the policy and with a gradient; empty for none.
    """

    columns: tuple[str, ...]
    ids_column: str


@frozen(eq=False)
class Advantages:
    """
    The advantages of a batch.

    Attributes:
        values: (B, R) float32, 0 on tokens outside the loss.
        returns: (B, R) targets of the critic; None without a critic.
    """

    values: Tensor
    returns: Tensor | None = None


@runtime_checkable
class AdvantageEstimator(Protocol):
    """Turns the rewards of a batch into advantages."""

    def estimate(  # noqa: PLR0913 - independent inputs, by name
        self,
        *,
        rewards: Tensor,
        groups: Tensor,
        valid: Tensor,
        token_rewards: Tensor,
        mask: Tensor,
        episodes: Tensor,
        timeline: Timeline,
        algorithm: AlgorithmConfig,
        values: Tensor | None = None,
        leave_out: Callable[[Tensor], PathRatios] | None = None,
        **more: Any,
    ) -> Tensor | Advantages:
        """
        Return the advantages of E episodes in B rows with R response columns.

        An episode has several rows if it has several trajectories or expanded paths. How often it was split must not
        change its advantages.

        Args:
            rewards: (E,), the reward of each episode, after the KL penalty.
            groups: (E,) int64, the group of each episode.
            valid: (E,) bool; False for a failed or unscored episode, which is no evidence about the policy.
            token_rewards: (B, R), where the reward function placed them, after the KL penalty.
            mask: (B, R) int64, 1 on tokens in the loss.
            episodes: (B,) int64, the episode of each row.
            timeline: the order in time of an episode's tokens, for estimators with time steps.
            algorithm: the section of the config.
            values: (B, R) of the critic, which a training with `gae` has.
            leave_out: measures, for the rows that (B,) bool chooses, how likely the rest of each episode is without
                each of its parallel paths. All training processes must call it equally often.
            more: later versions may add inputs.

        Returns:
            (E,), one for each episode, or (B, R); or the latter with the targets of the critic. The trainer sets
            them to 0 outside the mask.
        """


@frozen
class Objectives:
    """
    The parts of a training that turn rewards into losses, and the replays of its forward passes.

    Attributes:
        loss: of `train.loss`.
        advantage: of `train.algorithm.adv_estimator`.
        replays: of `train.replays`.
    """

    loss: PolicyLoss
    advantage: AdvantageEstimator
    replays: tuple[Replay, ...] = ()


@turnwise.hookspec
def register_losses(registry: Registry[PolicyLoss]) -> None:
    """Add losses of the policy; see `PolicyLoss`."""


@turnwise.hookspec
def register_advantages(registry: Registry[AdvantageEstimator]) -> None:
    """Add estimators of advantages; see `AdvantageEstimator`."""


def build_objectives(train: TrainConfig, recipe: PluginRecipe | None, code: OwnCode | None = None) -> Objectives:
    """
    Build the parts that a config names.

    Args:
        train: the `train` section. Without `train.loss` the loss is `ppo_clip` with the bounds of `train.algorithm`.
        recipe: of the run's plugins; None loads the trainer's own plugin alone.
        code: the user's own code that the run may use; None is none.

    Raises:
        ConfigError: options do not fit.
        PluginError: a name is unknown, or a part cannot be built.
    """
    from turnwise.config.own_code import OwnCode
    from turnwise.config.parts import Choice
    from turnwise.config.resolve import build_part
    from turnwise.plugin.host import load

    host = _load_own() if recipe is None else load(recipe)
    algorithm, loss = train.algorithm, train.loss
    if loss is None:
        bounds = {"clip_ratio_low": algorithm.clip_ratio_low, "clip_ratio_high": algorithm.clip_ratio_high}
        loss = Choice("ppo_clip", bounds)

    def build(kind: str, choice: Choice, path: str) -> Any:
        return build_part(host, kind, choice, Resources(), path=path, code=code or OwnCode())

    return Objectives(
        loss=build("losses", loss, "train.loss"),
        advantage=build("advantages", algorithm.adv_estimator, "train.algorithm.adv_estimator"),
        replays=build_replays(train.replays, host, code or OwnCode()),
    )


@cache
def _load_own() -> Host:
    from turnwise.plugin.host import load

    return load(PluginRecipe(allow=("grpo_trainer",)))
