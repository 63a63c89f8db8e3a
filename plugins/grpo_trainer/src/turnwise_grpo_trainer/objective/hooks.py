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
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

import turnwise
from turnwise import Registry, Resources
from turnwise.errors import ConfigError, PluginError, TurnwiseError, describe
from turnwise.types import PluginRecipe

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.config.own_code import OwnCode
    from turnwise.config.parts import Choice
    from turnwise_grpo_trainer.config import TrainConfig
    from turnwise_grpo_trainer.objective.path_ratios import PathRatios

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo")
"""Estimators whose advantages are differences from the other rewards of a group."""
BUILT_IN_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae")


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
            more: later versions may add inputs.

        Returns:
            (M,) losses to minimise; and (M,) values by name, whose means are logged as ``actor/NAME``. The names are
            the same for every micro-batch.
        """


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
        leave_out: Callable[[Tensor], PathRatios] | None = None,
        **more: Any,
    ) -> Tensor:
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
            leave_out: measures, for the rows that (B,) bool chooses, how likely the rest of each episode is without
                each of its parallel paths. All training processes must call it equally often.
            more: later versions may add inputs.

        Returns:
            (E,), one for each episode, or (B, R). The trainer sets them to 0 outside the mask.
        """


@frozen
class Objectives:
    """
    The registered parts of a training; None for the trainer's own.

    Attributes:
        loss: of `train.loss`.
        advantage: of `train.algorithm.adv_estimator`.
    """

    loss: PolicyLoss | None = None
    advantage: AdvantageEstimator | None = None


@turnwise.hookspec
def register_losses(registry: Registry[PolicyLoss]) -> None:
    """Add losses of the policy; see `PolicyLoss`."""


@turnwise.hookspec
def register_advantages(registry: Registry[AdvantageEstimator]) -> None:
    """Add estimators of advantages; see `AdvantageEstimator`."""


def build_objectives(train: TrainConfig, recipe: PluginRecipe | None, code: OwnCode | None = None) -> Objectives:
    """
    Build the registered parts that a config names.

    Args:
        train: the `train` section.
        recipe: of the run's plugins; None loads the installed ones, and nothing if no part is named.
        code: the user's own code that the run may use; None is none.

    Raises:
        ConfigError: a name is unknown, or options do not fit.
        PluginError: a part cannot be built.
    """
    estimator = train.algorithm.adv_estimator
    own = estimator.name in BUILT_IN_ADVANTAGES
    if own and estimator.options:
        raise ConfigError(f"train.algorithm.adv_estimator: {estimator.name} has no options")
    if own and train.loss is None:
        return Objectives()
    from turnwise.config.own_code import OwnCode, build_own
    from turnwise.plugin.host import load

    host = load(recipe)

    def build(kind: str, choice: Choice, path: str) -> Any:
        if choice.is_own_code:
            return build_own(host, kind, choice, Resources(), path, code or OwnCode())
        return _build(host.registry(kind), choice, path)

    return Objectives(
        loss=None if train.loss is None else build("losses", train.loss, "train.loss"),
        advantage=None if own else build("advantages", estimator, "train.algorithm.adv_estimator"),
    )


def _build(registry: Registry[Any], choice: Choice, path: str) -> Any:
    try:
        entry = registry.get(choice.name)
    except PluginError as error:
        own = f"; built in: {', '.join(BUILT_IN_ADVANTAGES)}" if registry.kind == "advantage" else ""
        raise ConfigError(f"{path}: {error}{own}") from None
    options: Any = turnwise.structure(dict(choice.options), entry.config, path=path)
    try:
        part = entry.factory(options, Resources())
    except TurnwiseError:
        raise
    except Exception as error:
        raise PluginError(f"{path}: {registry.kind} {choice.name!r} cannot be built: {describe(error)}") from error
    try:
        registry.check(part)
    except PluginError as error:
        raise PluginError(f"{path}: {registry.kind} {choice.name!r}: {error}") from None
    return part
