"""
One process of the trainer: a policy, and what it needs to learn from a batch.

Every process is given the whole batch and computes the same advantages; the rows are dealt out for the forward and
backward passes alone. So the result does not depend on how many processes or micro-batches there are.
"""

# ruff: noqa: TID253 - loaded by the trainer alone; no hook imports it

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from turnwise import RolloutBatch
from turnwise.protocols import ModelSpec
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.credit import credit_of, trained_tokens
from turnwise_grpo_trainer.losses import (
    clipped_surrogate,
    importance_weights,
    kl_estimate,
    log_prob_gap,
    token_weights,
    value_loss,
)
from turnwise_grpo_trainer.micro_batches import MicroBatch, budgeted, laid_out, shares
from turnwise_grpo_trainer.models import load_critic, load_policy, load_reference, token_log_probs, token_values
from turnwise_grpo_trainer.optimization import Trained
from turnwise_grpo_trainer.rows import TokenRows, flat, padded

Sums = dict[str, float]


@define(eq=False)
class Learner:
    """
    Learns from batches.

    Attributes:
        config: the `train` section.
        temperature: that the engine samples with.
        response_length: the longest response.
        device: where the models are.
        policy: what is trained.
        reference: frozen; None when no KL is asked for.
        critic: None but for `gae`.
        rank: of this process.
        world_size: how many processes there are.
    """

    config: TrainConfig
    temperature: float
    response_length: int
    device: torch.device
    policy: Trained
    reference: Any = None
    critic: Trained | None = None
    rank: int = 0
    world_size: int = 1
    _seconds: dict[str, float] = field(factory=dict, init=False)

    @classmethod
    def load(
        cls,
        config: TrainConfig,
        spec: ModelSpec,
        *,
        temperature: float,
        response_length: int,
        device: torch.device,
        place: Callable[[Any], Any] | None = None,
    ) -> Learner:
        """
        Load the models.

        Args:
            config: the `train` section.
            spec: which model.
            temperature: that the engine samples with.
            response_length: the longest response.
            device: where to train.
            place: puts each model there, sharded or not; None moves it.
        """
        if config.policy.num_threads is not None:
            # For this thread, which the updates run on, too; others keep what they have.
            torch.set_num_threads(config.policy.num_threads)
        put = place if place is not None else lambda model: model.to(device)
        optimizer, num_steps = config.optimizer, config.num_steps
        policy = Trained.of(put(load_policy(config.policy, spec)), optimizer, lr=optimizer.lr, num_steps=num_steps)
        reference = put(load_reference(config.policy, spec)) if config.algorithm.kl_loss_coef > 0 else None
        critic = None
        if config.algorithm.adv_estimator == "gae":
            model = put(load_critic(config.policy, spec))
            critic = Trained.of(model, optimizer, lr=config.critic.lr, num_steps=num_steps)
        learner = cls(config, temperature, response_length, device, policy, reference, critic)
        if dist.is_available() and dist.is_initialized():
            learner.rank, learner.world_size = dist.get_rank(), dist.get_world_size()
        return learner

    def update(self, batch: RolloutBatch, *, step: int, version: int) -> dict[str, float]:
        """
        Learn from a batch.

        Args:
            batch: episodes in groups; rows that were not scored say nothing.
            step: of the training, from 1.
            version: of the weights that the policy has. The log-probability gap is that of tokens sampled by it, when
                there are any.

        Returns:
            Numbers for the logs by name, the same in every process.
        """
        self._seconds.clear()
        algorithm = self.config.algorithm
        mask = trained_tokens(batch, mask_truncated=algorithm.mask_truncated)
        rows, metrics = self._prepared(batch, TokenRows.of(batch, mask))
        parts = [part for _ in range(algorithm.ppo_epochs) for part in self._mini_batches(rows)]
        before = rows.columns.get("old_log_probs")
        for number, part in enumerate(parts):
            sums, learnt, log_probs = self._learn(part, step)
            metrics.update({name: metrics.get(name, 0.0) + value / len(parts) for name, value in sums.items()})
            if number == 0:
                metrics |= _gap(learnt if before is None else rows, log_probs if before is None else before, version)
        metrics["actor/lr"] = self.policy.lr
        for trained in filter(None, (self.policy, self.critic)):
            trained.schedule.step()
        return metrics | {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}

    # What is computed before the first step

    def _prepared(self, batch: RolloutBatch, rows: TokenRows) -> tuple[TokenRows, dict[str, float]]:
        """Return the rows with what the loss is made of, and numbers for the logs."""
        algorithm = self.config.algorithm
        if self._needs_old():
            rows = rows.with_columns(old_log_probs=self._column(rows, self.policy.model, self._log_probs))
        if self.reference is not None:
            rows = rows.with_columns(ref_log_probs=self._column(rows, self.reference, self._log_probs))
        values = kl = None
        if self.critic is not None:
            rows = rows.with_columns(old_values=self._column(rows, self.critic.model, token_values))
            values = padded(batch, rows["old_values"])
        if algorithm.use_kl_in_reward and self.reference is not None:
            kl = padded(batch, rows["old_log_probs"] - rows["ref_log_probs"])
        mask = padded(batch, rows["loss_mask"])
        credit = credit_of(batch, algorithm, mask=mask, kl=kl, values=values)
        rows = rows.with_columns(advantages=flat(batch, credit.advantages))
        metrics = {"actor/trained_tokens": float(mask.sum()), "actor/trained_rows": float((mask.sum(1) > 0).sum())}
        if credit.returns is not None:
            rows = rows.with_columns(returns=flat(batch, credit.returns))
            metrics["critic/return"] = float(rows["returns"][rows.targets].mean()) if len(rows.targets) else 0.0
        return rows, metrics

    def _needs_old(self) -> bool:
        algorithm = self.config.algorithm
        if algorithm.use_kl_in_reward and self.reference is not None:
            return True
        one_step = algorithm.ppo_epochs == 1 and algorithm.ppo_mini_batch_size is None
        return algorithm.old_log_probs == "recompute" and not one_step

    def _log_probs(self, model: Any, micro: MicroBatch) -> Tensor:
        return token_log_probs(model, micro, self.temperature)[0]

    @torch.no_grad()
    def _column(self, rows: TokenRows, model: Any, compute: Callable[[Any, MicroBatch], Tensor]) -> Tensor:
        """Return (N,) what a model says of the tokens in the loss, from all processes."""
        column = torch.zeros(rows.num_tokens)
        with self._timed("log_probs"), self._autocast():
            for micro, counts in self._micro_batches(rows):
                values = compute(model, micro.to(self.device)).cpu()
                if counts:
                    column[micro.tokens] = values
        return self._summed(column)

    # One step of the optimizer

    def _mini_batches(self, rows: TokenRows) -> Iterator[TokenRows]:
        size = self.config.algorithm.ppo_mini_batch_size or max(len(rows), 1)
        for start in range(0, max(len(rows), 1), size):
            yield rows.select(range(start, min(start + size, len(rows))))

    def _learn(self, rows: TokenRows, step: int) -> tuple[Sums, TokenRows, Tensor]:
        """
        Step once on a mini-batch.

        Returns:
            Sums for the logs, the mini-batch with what was learnt from as its loss mask, and (N,) log-probabilities of
            these tokens from before the step.
        """
        targets = rows.targets
        log_probs = torch.zeros(rows.num_tokens)
        if not len(targets):
            return {}, rows, log_probs
        row_of = rows.row_index[targets]
        weights = torch.zeros(rows.num_tokens)
        weights[targets] = token_weights(
            row_of,
            self.config.algorithm.agg_mode,
            num_rows=int(torch.bincount(row_of).count_nonzero()),
            num_tokens=len(targets),
            response_length=self.response_length,
        )
        rows = self._with_effect(rows.with_columns(weights=weights))
        sums: Sums = {}
        with self._timed("forward_backward"):
            for micro, counts in self._micro_batches(rows):
                # Sharded gradients are averaged over the processes, and the loss is a sum over them.
                scale = float(counts) * self.world_size
                log_probs[micro.tokens] += self._backward(rows, micro, scale, sums)
        sums = self._all_sums(sums)
        with self._timed("optimizer"):
            warm = self.critic is None or step > self.config.critic.warmup_steps
            sums["actor/grad_norm"] = self.policy.step() if warm else self._cleared()
            if self.critic is not None:
                sums["critic/grad_norm"] = self.critic.step()
        return sums, rows, self._summed(log_probs)

    def _with_effect(self, rows: TokenRows) -> TokenRows:
        """
        Leave out of the loss what cannot move the weights: in a group of equal rewards all advantages are 0.

        The means are taken over all tokens before, so the gradient is the same.
        """
        algorithm = self.config.algorithm
        in_loss = algorithm.kl_loss_coef != 0 and not algorithm.use_kl_in_reward
        if in_loss or algorithm.entropy_coeff != 0 or self.critic is not None:
            return rows
        moves = torch.zeros(len(rows)).index_add_(0, rows.row_index, (rows["advantages"] * rows["loss_mask"]).abs())
        # Where nothing does, one row brings the gradient of 0 that the optimizer goes on with.
        moves[rows.row_index[rows.targets[0]]] += float(not moves.any())
        return rows.with_columns(loss_mask=rows["loss_mask"] * (moves > 0)[rows.row_index])

    def _cleared(self) -> float:
        self.policy.optimizer.zero_grad()
        return 0.0

    def _backward(self, rows: TokenRows, micro: MicroBatch, scale: float, sums: Sums) -> Tensor:
        """Add to the gradients; return (M,) log-probabilities, 0 for a micro-batch that does not count."""
        here = micro.to(self.device)
        algorithm = self.config.algorithm
        with self._autocast():
            log_probs, entropy = token_log_probs(
                self.policy.model, here, self.temperature, entropy=algorithm.entropy_coeff != 0
            )
        loss, parts = self._policy_loss(rows, micro, log_probs, entropy)
        weights = rows["weights"][micro.tokens].to(self.device)
        torch.autograd.backward(scale * (weights * loss).sum())
        if self.critic is not None:
            with self._autocast():
                values = token_values(self.critic.model, here)
            old, returns = (rows[name][micro.tokens].to(self.device) for name in ("old_values", "returns"))
            errors = value_loss(values, old, returns, self.config.critic.cliprange_value)
            torch.autograd.backward(scale * (weights * errors).sum())
            parts["critic/value_loss"] = (weights * errors).sum()
        counted = float(scale > 0)
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + counted * float(value.detach())
        return log_probs.detach().cpu() * counted

    def _policy_loss(
        self, rows: TokenRows, micro: MicroBatch, log_probs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm = self.config.algorithm

        def column(name: str) -> Tensor:
            return rows[name][micro.tokens].to(self.device)

        rollout = column("rollout_log_probs")
        old = column("old_log_probs") if "old_log_probs" in rows.columns else log_probs.detach()
        if algorithm.old_log_probs == "rollout":
            old = rollout
        surrogate, clipped = clipped_surrogate(
            log_probs, old, column("advantages"), algorithm.clip_ratio_low, algorithm.clip_ratio_high
        )
        share = 1 / len(rows.targets)
        parts = {"actor/clip_frac": clipped.float().sum() * share}
        if algorithm.tis_imp_ratio_cap is not None and algorithm.old_log_probs == "recompute":
            weight = importance_weights(old, rollout, algorithm.tis_imp_ratio_cap)
            surrogate = surrogate * weight
            parts["actor/tis_mean"] = weight.sum() * share
            parts["actor/tis_capped"] = (weight >= algorithm.tis_imp_ratio_cap).float().sum() * share
        weights = column("weights")
        parts["actor/pg_loss"] = (weights * surrogate).sum()
        loss = surrogate
        if "ref_log_probs" in rows.columns:
            kl = kl_estimate(log_probs, column("ref_log_probs"), algorithm.kl_loss_type)
            parts["actor/kl"] = kl.sum() * share
            if not algorithm.use_kl_in_reward:
                loss = loss + algorithm.kl_loss_coef * kl
        if entropy is not None:
            parts["actor/entropy"] = entropy.sum() * share
            loss = loss - algorithm.entropy_coeff * entropy
        return loss, parts

    # Processes

    def _micro_batches(self, rows: TokenRows) -> Iterator[tuple[MicroBatch, bool]]:
        """
        Yield this process's micro-batches, and whether each counts.

        Sharded models take turns together: a process that has fewer of them repeats one that counts for nothing.
        """
        policy = self.config.policy
        each = [
            budgeted(rows, share, max_tokens=policy.max_tokens_per_micro_batch, packed=policy.packed)
            for share in shares(rows, self.world_size)
        ]
        filler = each[0][-1] if each[0] else []
        for number in range(max(map(len, each))):
            own = each[self.rank]
            counts = number < len(own)
            yield laid_out(rows, own[number] if counts else filler, packed=policy.packed), counts

    def _summed(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            there = tensor.to(self.device)
            dist.all_reduce(there)
            return there.cpu()
        return tensor

    def _all_sums(self, sums: Sums) -> Sums:
        names = sorted(sums)
        total = self._summed(torch.tensor([sums[name] for name in names], dtype=torch.float64))
        return dict(zip(names, total.tolist(), strict=True))

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.policy.autocast)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started


def _gap(rows: TokenRows, log_probs: Tensor, version: int) -> dict[str, float]:
    """Return the gap to the rollout: on tokens of this version, or where there are none on all."""
    targets = rows.targets
    fresh = targets[rows["weight_versions"][targets] == version]
    chosen = fresh if len(fresh) else targets
    gap = log_prob_gap(log_probs[chosen], rows["rollout_log_probs"][chosen])
    return {
        "gap/mean": gap.mean,
        "gap/max": gap.max,
        "gap/max_relative": gap.max_relative,
        "gap/kl": gap.kl,
        "gap/tokens": float(gap.num_tokens),
        "gap/fresh": len(fresh) / max(len(targets), 1),
    }
