"""
Requirements of the losses and advantages that plugins register with a trainer, as plain functions without pytest.

The checks make their own tokens and rewards: M tokens in the loss, E episodes, B rows, R response columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from attrs import frozen

from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
_ROWS = (0, 0, 0, 1, 1, 2, 2, 2, 2, 3)
"""The row of each token."""
_NUM_IDS = 3
"""Ids of a column of ids."""
_ATOL = 1e-5


@frozen(kw_only=True)
class LossProbe:
    """The probe of a loss: `make_loss` builds it, as the registered factory does."""

    make_loss: Callable[[], Any]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the open columns that the loss reads; see `ColumnLoss` of the trainer."""
        return tuple(getattr(self.make_loss(), "columns", ()))

    def tokens(self, seed: int = 0, spread: float = 0.3) -> Tensors:
        """Return the inputs of `make_tokens`, and random values of the columns, whose names start with a dot."""
        import torch

        tokens, columns, ids = make_tokens(seed, spread), self.columns, getattr(self.make_loss(), "ids_column", "")
        generator = torch.Generator().manual_seed(seed + 1)
        shape = (len(_ROWS), _NUM_IDS) if ids else (len(_ROWS),)
        for name in (*columns, *(["id_log_probs"] if ids else [])):
            tokens[f".{name}"] = -1.0 - torch.rand(shape, generator=generator) * (1 + spread)
        if ids:
            tokens[f".{ids}"] = torch.arange(_NUM_IDS, dtype=torch.int32).expand(shape).clone()
        return tokens

    def gradient(self, tokens: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (M,) losses of tokens, and (M,) the gradient of their sum."""
        import torch

        log_probs = tokens["log_probs"].clone().requires_grad_()
        given: dict[str, object] = {name: each for name, each in tokens.items() if not name.startswith(".")}
        if columns := self.columns:
            given["columns"] = {name: tokens[f".{name}"] for name in columns}
        if ".id_log_probs" in tokens:
            # In a training, all log-probabilities of a token come from one distribution.
            given["id_log_probs"] = tokens[".id_log_probs"] + (log_probs - log_probs.detach())[:, None]
        losses, values = self.make_loss().compute(**{**given, "log_probs": log_probs})
        size = tuple(log_probs.shape)
        expect(tuple(losses.shape) == size, f"{size[0]} tokens have losses of the shape {tuple(losses.shape)}")
        for name, value in values.items():
            expect(tuple(value.shape) == size, f"the value {name!r} has the shape {tuple(value.shape)}, not {size}")
        expect(losses.requires_grad, "the losses have no gradient with respect to log_probs")
        (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
        return losses.detach(), gradient


def make_tokens(seed: int = 0, spread: float = 0.3) -> Tensors:
    """Return the inputs of a loss for four rows; log-ratios have the standard deviation `spread`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor(_ROWS)
    log_probs = -torch.rand(len(rows), generator=generator) * 3

    def moved() -> Tensor:
        return log_probs + spread * torch.randn(len(rows), generator=generator)

    return {
        "log_probs": log_probs,
        "old_log_probs": moved(),
        "rollout_log_probs": moved(),
        "advantages": torch.tensor([1.0, -0.5, 0.0, 2.0])[rows],
        "rows": rows,
    }


LOSS_CHECKS: dict[str, Check] = {}
"""Every check of losses by the name of its function without `check_`."""
LOSSES = PartChecks(
    checks=LOSS_CHECKS,
    probe=lambda part: LossProbe(make_loss=part.make),
)
_check_loss = register(LOSS_CHECKS)


@_check_loss
def check_gradient_is_finite(probe: LossProbe) -> None:
    """Losses and gradients are finite, also where the policies differ by 60 nats in one token."""
    for spread in (0.0, 0.3, 30.0):
        losses, gradient = probe.gradient(probe.tokens(spread=spread))
        expect(bool(losses.isfinite().all()), f"a loss is not finite with log-ratios of about {spread:g}")
        expect(bool(gradient.isfinite().all()), f"a gradient is not finite with log-ratios of about {spread:g}")


@_check_loss
def check_follows_the_advantages(probe: LossProbe) -> None:
    """Where the policy has not moved yet, a step makes tokens with positive advantages more likely, without columns."""
    if probe.columns:
        return  # a teacher may say otherwise than the reward
    tokens = probe.tokens(spread=0.0)
    _, gradient = probe.gradient(tokens)
    gain = -(gradient * tokens["advantages"]).sum().item()
    expect(gain > 0, f"a step against the gradient changes the advantage-weighted log-probabilities by {gain:g}")


@_check_loss
def check_order_of_rows_changes_nothing(probe: LossProbe) -> None:
    """The order of the tokens in a micro-batch has no effect on the loss and the gradient of a token."""
    import torch

    tokens = probe.tokens()
    order = torch.randperm(len(_ROWS), generator=torch.Generator().manual_seed(1))
    before, after = probe.gradient(tokens), probe.gradient({name: each[order] for name, each in tokens.items()})
    for name, one, other in zip(("loss", "gradient"), before, after, strict=True):
        expect(torch.allclose(one[order], other, atol=_ATOL), f"the {name} of a token depends on the order")


@_check_loss
def check_micro_batches_change_nothing(probe: LossProbe) -> None:
    """A row has the same losses and gradients alone as with other rows, because micro-batches cut between rows."""
    import torch

    tokens = probe.tokens()
    whole = probe.gradient(tokens)
    for row in set(_ROWS):
        own = tokens["rows"] == row
        alone = probe.gradient({name: each[own] for name, each in tokens.items()})
        for name, one, other in zip(("loss", "gradient"), whole, alone, strict=True):
            expect(torch.allclose(one[own], other, atol=_ATOL), f"the {name} of row {row} depends on the other rows")


@_check_loss
def check_inputs_are_constants(probe: LossProbe) -> None:
    """No gradient flows into advantages or old log-probabilities, and no input is changed."""
    import torch

    tokens = probe.tokens()
    copies = {name: each.clone() for name, each in tokens.items()}
    probe.gradient(tokens)
    for name, each in tokens.items():
        expect(torch.equal(each, copies[name]), f"the input {name!r} was changed")


@frozen
class _Lines:
    """The order in time of an episode's tokens, as the trainer gives it: its rows follow each other."""

    episodes: Tensor

    def join(self, values: Tensor) -> Tensor:
        """Return (E, S) the values of each episode's rows in one line, 0 after its end."""
        from torch.nn.utils.rnn import pad_sequence

        return pad_sequence([values[rows].flatten() for rows in self._rows()], batch_first=True)

    def split(self, values: Tensor) -> Tensor:
        """Return (B, R) the values of (E, S) lines; the inverse of `join`."""
        rows = self._rows()
        width = values.shape[1] // max(map(len, rows))
        parts = values.new_zeros(len(self.episodes), width)
        for line, own in zip(values, rows, strict=True):
            parts[own] = line[: len(own) * width].reshape(len(own), width)
        return parts

    def _rows(self) -> list[Tensor]:
        return [(self.episodes == episode).nonzero().flatten() for episode in sorted(set(self.episodes.tolist()))]


@frozen(kw_only=True)
class AdvantageProbe:
    """The probe of an estimator: `make_estimator` builds it, as the registered factory does."""

    make_estimator: Callable[[], Any]

    def estimate(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (B, R) the advantages of a batch, 0 outside the mask."""
        found = self.make_estimator().estimate(
            **{name: each.clone() for name, each in batch.items()},
            timeline=_Lines(batch["episodes"]),
            algorithm=SimpleNamespace(gamma=1.0, lam=0.95, norm_adv=True),
            values=0.1 * batch["mask"],
        )
        found = getattr(found, "values", found) if hasattr(found, "returns") else found
        episodes, mask = tuple(batch["rewards"].shape), tuple(batch["mask"].shape)
        shape = tuple(found.shape)
        expect(shape in (episodes, mask), f"advantages have the shape {shape}; expected {episodes} or {mask}")
        values: Tensor = found if shape == mask else found[batch["episodes"]][:, None].expand(mask)
        return values * batch["mask"]


def make_rewards(seed: int = 0) -> Tensors:
    """Return the inputs of an estimator: two groups of three episodes in a row each, one of them unscored."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(6, generator=generator)
    mask = (torch.rand(6, 5, generator=generator) < 0.7).long()
    mask[:, 0] = 1
    valid = torch.tensor([True, True, True, True, False, True])
    mask[~valid] = 0
    token_rewards = torch.zeros(6, 5)
    token_rewards[:, 0] = rewards
    return {
        "rewards": rewards * valid,
        "groups": torch.tensor([0, 0, 0, 1, 1, 1]),
        "valid": valid,
        "token_rewards": token_rewards * valid[:, None],
        "mask": mask,
        "episodes": torch.arange(6),
    }


ADVANTAGE_CHECKS: dict[str, Check] = {}
"""Every check of advantages by the name of its function without `check_`."""
ADVANTAGES = PartChecks(
    checks=ADVANTAGE_CHECKS,
    probe=lambda part: AdvantageProbe(make_estimator=part.make),
)
_check_advantage = register(ADVANTAGE_CHECKS)


@_check_advantage
def check_advantages_are_finite(probe: AdvantageProbe) -> None:
    """Advantages are finite, also in groups with equal rewards, with huge rewards, and in a batch of one episode."""
    batch = make_rewards()
    one = {name: each[:1] for name, each in batch.items()}
    equal = batch | {"rewards": batch["rewards"] * 0 + 0.1, "token_rewards": batch["token_rewards"] * 0}
    huge = batch | {"rewards": batch["rewards"] * 1e6, "token_rewards": batch["token_rewards"] * 1e6}
    for name, each in {"usual rewards": batch, "equal rewards": equal, "huge rewards": huge, "one": one}.items():
        expect(bool(probe.estimate(each).isfinite().all()), f"an advantage is not finite: {name}")


@_check_advantage
def check_order_of_episodes_changes_nothing(probe: AdvantageProbe) -> None:
    """The order of the episodes of a batch has no effect on their advantages."""
    import torch

    batch = make_rewards()
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    moved = {name: each[order] for name, each in batch.items()} | {"episodes": torch.arange(6)}
    expected, found = probe.estimate(batch)[order], probe.estimate(moved)
    expect(torch.allclose(expected, found, atol=_ATOL), "the advantages depend on the order of the episodes")


@_check_advantage
def check_rewards_of_unscored_episodes_change_nothing(probe: AdvantageProbe) -> None:
    """An episode that failed or was not scored has no effect on the others: its reward is no evidence."""
    import torch

    batch = make_rewards()
    other = batch | {"rewards": torch.where(batch["valid"], batch["rewards"], 100.0)}
    expect(
        torch.allclose(probe.estimate(batch), probe.estimate(other), atol=_ATOL),
        "the reward of an episode that is not valid changes advantages",
    )


@_check_advantage
def check_expanding_an_episode_changes_nothing(probe: AdvantageProbe) -> None:
    """An episode that is split into more rows, as parallel paths are, has the same advantages, and so have others."""
    import torch

    batch = make_rewards()
    left, right = batch["mask"].clone(), batch["mask"].clone()
    left[:, 2:], right[:, :2] = 0, 0
    index = torch.tensor([0, 0, 0, 1, 2, 3, 4, 5])
    mask = torch.stack([left[0], right[0], right[0] * 0, *batch["mask"][1:]])
    rewards = torch.stack([batch["token_rewards"][0], *torch.zeros(2, 5), *batch["token_rewards"][1:]])
    split = batch | {"episodes": index, "mask": mask, "token_rewards": rewards}
    expected, found = probe.estimate(batch), probe.estimate(split)
    joined = torch.zeros_like(expected).index_add(0, index, found)
    expect(torch.allclose(expected, joined, atol=_ATOL), "the advantages depend on the number of an episode's rows")
