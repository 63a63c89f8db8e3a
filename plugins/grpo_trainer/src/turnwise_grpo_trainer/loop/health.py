"""
Signs that a training is lost: the noise scale over several steps, and warnings in plain language.

Each warning comes once in a training; its state is part of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from attrs import define, field

EMA_DECAY: Final = 0.9
"""Share of the earlier steps in the averages of signal and trace, whose ratio is the noise scale."""
MIN_NOISE_STEPS: Final = 5
"""Steps with a measurement before the noise scale can be a reason for a warning."""
NOISE_RATIO: Final = 10.0
"""A noise scale of this many mini-batches: the cosine between a mini-batch's gradient and the true one is about 0.3."""
MAX_NATS: Final = 0.5
"""Movement of the policy in one step, in nats a sequence."""
MIN_EFFECTIVE_SHARE: Final = 0.5
"""Effective sample size of the importance weights, as a share of the tokens."""
MOST_TRUNCATED: Final = 0.5
"""Share of truncated episodes above which there is a warning."""
REWARD_STEPS: Final = 20
"""Steps over which the reward must change by more than its standard error."""


@define
class TrainingHealth:
    """
    Follows the metrics of a training.

    Attributes:
        by_groups: whether the advantages compare the rewards of a group: without differences there is nothing to learn.
        watch_reward: whether a reward that does not change is a reason for a warning. With dynamic sampling it is none:
            uniform groups are dropped, which keeps the mean in the middle.
        warnings: warnings so far, by condition, in order of appearance.
    """

    watch_reward: bool = True
    by_groups: bool = True
    warnings: dict[str, str] = field(factory=dict)
    _noise_steps: int = field(default=0, init=False)
    _signal: float = field(default=0.0, init=False)
    _trace: float = field(default=0.0, init=False)
    _shares: int = field(default=0, init=False)
    _share: float = field(default=0.0, init=False)
    _share_square: float = field(default=0.0, init=False)
    _rewards: list[tuple[float, float]] = field(factory=list, init=False)

    def observe(self, step: int, metrics: dict[str, float]) -> list[str]:
        """
        Add `noise/scale` to the metrics of a step, and return the warnings that are new.

        Args:
            step: number of the step.
            metrics: of the update and of the episodes.
        """
        # A gradient that is not finite changes no weight, and must not change the averages for ever.
        if math.isfinite(metrics.get("noise/trace", math.nan)):
            self._add_noise(metrics["noise/signal"], metrics["noise/trace"])
            metrics["noise/scale"] = self.noise_scale
        if "noise/square" in metrics:
            self._add_share(metrics["noise/agreement"], metrics["noise/square"])
            metrics["noise/cosine"] = self.expected_cosine
        if "reward/stderr" in metrics:
            self._rewards = [*self._rewards, (metrics["reward/mean"], metrics["reward/stderr"])][-REWARD_STEPS:]
        found = {name: f"step {step}: {text}" for name, text in self._conditions(metrics) if name not in self.warnings}
        self.warnings |= found
        return list(found.values())

    def _add_noise(self, signal: float, trace: float) -> None:
        self._noise_steps += 1
        self._signal += (1 - EMA_DECAY) * (signal - self._signal)
        self._trace += (1 - EMA_DECAY) * (trace - self._trace)

    def _add_share(self, agreement: float, square: float) -> None:
        if not math.isfinite(square) or square == 0:
            return
        # The expected share is within these bounds. A mini-batch of almost equal rewards has a tiny gradient, and its
        # quotient would outweigh all other steps.
        share = max(-1.0, min(agreement / square, 1.0))
        self._shares += 1
        self._share += (1 - EMA_DECAY) * (share - self._share)
        self._share_square += (1 - EMA_DECAY) * (share**2 - self._share_square)

    @property
    def noise_scale(self) -> float:
        """
        tr(Sigma) / |G|^2 in groups, from averages over the steps; infinite if no signal was found in the noise.

        Both averages start at 0, and this cancels in their ratio. It is NaN if all gradients were 0.
        """
        if self._signal > 0:
            return max(self._trace, 0.0) / self._signal
        return math.inf if self._trace > 0 else math.nan

    @property
    def expected_cosine(self) -> float:
        """
        Return a cautious estimate of the cosine between a mini-batch's gradient and the true one.

        Its square is |G|^2 over the expected squared length of a mini-batch's gradient. The product of a gradient with
        the mean of those before it estimates |G|^2, because the noise of mini-batches is independent. The estimate is
        less rough than `noise/signal`, whose halves have more noise than a mean of ten mini-batches. It is too small if
        the gradient has turned since, so steps that are too long get shorter.

        The square is the mean over the steps minus its standard error, so that noise which looks like signal by chance
        moves nothing. The cosine is 0 before two measurements, and if no signal was found.
        """
        if self._shares < 2:
            return 0.0
        decayed = EMA_DECAY**self._shares
        mean, square = self._share / (1 - decayed), self._share_square / (1 - decayed)
        effective = (1 + EMA_DECAY) / (1 - EMA_DECAY) * (1 - decayed) / (1 + decayed)
        error = math.sqrt(max(0.0, square - mean**2) / (effective - 1))
        return math.sqrt(min(1.0, max(0.0, mean - error)))

    def _conditions(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the conditions that hold, and a warning for each."""
        if self.by_groups and metrics.get("groups/varied") == 0:
            yield (
                "variance",
                f"in no group do the rewards differ (their mean is {metrics['reward/mean']:.3g}), so the advantages are"
                " 0 and nothing is learned; check the reward, raise rollout.n or rollout.sampling.temperature, or take"
                " tasks that the model solves sometimes",
            )
        if metrics.get("status/truncated", 0.0) > MOST_TRUNCATED:
            names = {key.removeprefix("limit/"): share for key, share in metrics.items() if key.startswith("limit/")}
            limits = ", ".join(
                f"{share:.0%} by {name}" for name, share in sorted(names.items(), key=itemgetter(1))[::-1]
            )
            yield (
                "truncation",
                f"{metrics['status/truncated']:.0%} of the episodes were truncated ({limits}); raise the limits if they"
                " should end by themselves",
            )
        batch, scale = metrics.get("noise/batch", 0.0), metrics.get("noise/scale", 0.0)
        if self._noise_steps >= MIN_NOISE_STEPS and scale > NOISE_RATIO * batch:
            size = "too large to be measured" if math.isinf(scale) else f"of {scale:.0f}"
            yield (
                "noise",
                f"mini-batches of {batch:.3g} groups against a noise scale {size}: steps are mostly noise; raise"
                " train.algorithm.ppo_mini_batch_size or train.tasks_per_step, or lower train.optimizer.lr",
            )
        if metrics.get("policy/nats", 0.0) > MAX_NATS:
            yield (
                "movement",
                f"the policy moved {metrics['policy/nats']:.2f} nats a sequence in one step; lower train.optimizer.lr,"
                " or set train.optimizer.warmup_steps or train.algorithm.target_kl",
            )
        if metrics.get("importance/ess", 1.0) < MIN_EFFECTIVE_SHARE:
            yield (
                "importance",
                f"the importance weights leave {metrics['importance/ess']:.0%} of the batch: the tokens are from"
                " another policy than the trainer's; see gap/mean and buffer/staleness",
            )
        if self.watch_reward and len(self._rewards) == REWARD_STEPS:
            change, error = reward_change(self._rewards)
            if abs(change) < error:
                yield (
                    "reward",
                    f"the reward changed by {change:+.3f} over the last {REWARD_STEPS} steps, less than its standard"
                    f" error of {error:.3f}: the steps show no learning",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "warnings": dict(self.warnings),
            "noise": [self._noise_steps, self._signal, self._trace],
            "cosine": [self._shares, self._share, self._share_square],
            "rewards": [list(each) for each in self._rewards],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.warnings = dict(state["warnings"])
        self._noise_steps, self._signal, self._trace = state["noise"]
        self._shares, self._share, self._share_square = state["cosine"]
        self._rewards = [(mean, error) for mean, error in state["rewards"]]


def reward_change(rewards: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """
    Return the difference between the mean rewards of the later and the earlier half of steps, and its standard error.

    Args:
        rewards: mean and standard error of an even number of steps.
    """
    half = len(rewards) // 2
    early, late = (sum(mean for mean, _ in part) / half for part in (rewards[:half], rewards[half:]))
    return late - early, math.sqrt(sum(error**2 for _, error in rewards)) / half
