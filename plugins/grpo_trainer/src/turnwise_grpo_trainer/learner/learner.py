"""
One training process: the policy update, with reference, critic and optimizers.

Every process gets the whole batch and computes the same advantages. Only the forward and backward passes are sharded,
so the result does not depend on the number of processes or micro-batches.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from turnwise import RolloutBatch
from turnwise.config.own_code import OwnCode
from turnwise.protocols import ModelSpec
from turnwise.types import PluginRecipe
from turnwise_engine_support.picture_families import supports_pictures
from turnwise_engine_support.pictures import PictureReader
from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.learner.batch_sizes import BatchSizes
from turnwise_grpo_trainer.learner.gradient_noise import NoiseMeter
from turnwise_grpo_trainer.learner.log_probs import Entropy, token_log_probs, token_values
from turnwise_grpo_trainer.learner.lora import BaseModel, without_dropout
from turnwise_grpo_trainer.learner.micro_batches import MicroBatch
from turnwise_grpo_trainer.learner.mini_batches import MiniBatch, Share, split_batch
from turnwise_grpo_trainer.learner.models import load_critic, load_policy, load_reference
from turnwise_grpo_trainer.learner.needs import needs_all_rows, needs_old_log_probs
from turnwise_grpo_trainer.learner.optimization import TrainableModel
from turnwise_grpo_trainer.learner.passes import Packing, Sharing
from turnwise_grpo_trainer.learner.prefix_sharing import find_sharing
from turnwise_grpo_trainer.learner.replaying import PolicyReplays, loss_inputs
from turnwise_grpo_trainer.learner.update_metrics import (
    StepMetrics,
    average,
    count_tokens,
    drop_unmeasured,
    find_measured,
    gap_metrics,
    shift_metrics,
    spread_rows,
)
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask, estimate_advantages
from turnwise_grpo_trainer.objective.hooks import ColumnLoss, Objectives, build_objectives
from turnwise_grpo_trainer.objective.loss_columns import add_loss_columns, find_labels, split_log_probs
from turnwise_grpo_trainer.objective.losses import token_weights, value_loss
from turnwise_grpo_trainer.objective.path_ratios import measure_paths
from turnwise_grpo_trainer.objective.picture_rows import add_pictures
from turnwise_grpo_trainer.objective.policy_loss import policy_loss
from turnwise_grpo_trainer.objective.rows import TokenRows, pad, unpad
from turnwise_grpo_trainer.report.stage_meter import StageMeter


@define(eq=False)
class Learner:
    """
    Updates the policy from batches.

    Attributes:
        config: the `train` section.
        temperature: sampling temperature of the engine.
        response_length: the longest possible response.
        device: the device of the models.
        policy: the trained model.
        reference: frozen model; None if `kl_loss_coef` is 0.
        critic: None unless the estimator is `gae`.
        rank: rank of this process.
        world_size: number of processes.
        objectives: the loss and the advantages.
        sizes: of forward passes and of chunks of logits.
        sharing: costs of forests of rows that share prefixes; None if the model cannot compute them, or shall not.
        reader: of the pictures of a vision-language model; None for another.
        replays: which the policy's forward passes follow.
        advantages: (B, R) of the last batch; None before the first.
    """

    config: TrainConfig
    temperature: float
    response_length: int
    device: torch.device
    policy: TrainableModel
    reference: Any = None
    critic: TrainableModel | None = None
    rank: int = 0
    world_size: int = 1
    objectives: Objectives = field(kw_only=True)
    sizes: BatchSizes = field(kw_only=True)
    sharing: Sharing | None = field(default=None, kw_only=True)
    reader: PictureReader | None = field(default=None, kw_only=True)
    replays: PolicyReplays = field(factory=PolicyReplays, kw_only=True)
    advantages: Tensor | None = field(default=None, init=False)
    _meter: StageMeter = field(factory=StageMeter, init=False)

    @classmethod
    def load(  # noqa: PLR0913 - independent inputs, five of them by name
        cls,
        config: TrainConfig,
        spec: ModelSpec,
        *,
        temperature: float,
        response_length: int,
        device: torch.device,
        to_device: Callable[[Any], Any] | None = None,
        plugins: PluginRecipe | None = None,
        code: OwnCode | None = None,
    ) -> Learner:
        """
        Load the models.

        Args:
            config: the `train` section.
            spec: the model to load.
            temperature: sampling temperature of the engine.
            response_length: the longest possible response.
            device: the device to train on.
            to_device: moves each model to the device and may shard it; None only moves it.
            plugins: of the run, which may have the loss and the advantages; None takes the installed ones.
            code: the user's own code that the run may use, which may have them too.
        """
        if config.policy.num_threads is not None:
            # The setting is per thread. Updates run on this thread, too; other threads keep their setting.
            torch.set_num_threads(config.policy.num_threads)
        move = to_device if to_device is not None else lambda model: model.to(device)
        objectives = build_objectives(config, plugins, code)
        optimizer, num_steps = config.optimizer, config.num_steps
        model = load_policy(config.policy, spec, config.lora)
        sizes = BatchSizes.choose(config.policy, model, device)  # before the model may be sharded
        sharing = find_sharing(config, model)
        replays = PolicyReplays.prepare(objectives.replays, model, spec)
        model = move(model)
        policy = TrainableModel.create(model, optimizer, lr=optimizer.lr, num_steps=num_steps)
        reference = critic = None
        if config.algorithm.kl_loss_coef > 0:
            reference = BaseModel(model) if config.lora else move(load_reference(config.policy, spec))
        if config.algorithm.adv_estimator.name == "gae":
            model = move(load_critic(config.policy, spec))
            critic = TrainableModel.create(model, optimizer, lr=config.critic.lr, num_steps=num_steps)
        make = partial(cls, config, temperature, response_length, device, policy, reference, critic)
        reader = PictureReader(spec.path) if spec.path is not None and supports_pictures(spec.path) else None
        learner = make(objectives=objectives, sizes=sizes, sharing=sharing, reader=reader, replays=replays)
        if dist.is_available() and dist.is_initialized():
            learner.rank, learner.world_size = dist.get_rank(), dist.get_world_size()
        return learner

    def update(self, batch: RolloutBatch, *, step: int, version: int, lr_factor: float = 1.0) -> dict[str, float]:
        """
        Update the policy, and the critic if there is one.

        Args:
            batch: episodes in groups; unscored rows are excluded.
            step: training step, from 1.
            version: weight version of the policy. The log-probability gap is measured on tokens that were sampled with
                this version, or on all tokens if there are none.
            lr_factor: multiplies the policy's learning rate in this step.

        Returns:
            Metrics by name, the same in every process.
        """
        self._meter = StageMeter()
        algorithm = self.config.algorithm
        mask = compute_loss_mask(batch, mask_truncated=algorithm.mask_truncated)
        rows = add_pictures(TokenRows.from_batch(batch, mask), batch.column("pictures"), self.reader, self.policy.model)
        rows = add_loss_columns(rows, batch, self.objectives.loss)
        rows, replayed = self.replays.add_columns(rows, batch)
        rows, metrics = self._prepare(batch, rows)
        sequences = batch.episode_index if algorithm.loss_sequence == "episode" else torch.arange(len(batch))
        rows = rows.with_columns(sequence=sequences[rows.row_index])
        self.policy.scale_lr(lr_factor)
        metrics |= self._train_epochs(rows, split_batch(rows, batch, algorithm.ppo_mini_batch_size), step, version)
        metrics["actor/lr"] = self.policy.lr
        for trainable in filter(None, (self.policy, self.critic)):
            trainable.advance()
        return metrics | replayed | self._meter.metrics()

    def _prepare(self, batch: RolloutBatch, rows: TokenRows) -> tuple[TokenRows, dict[str, float]]:
        """Return the rows with log-probabilities, values and advantages as the loss needs them, and metrics."""
        algorithm = self.config.algorithm
        if needs_old_log_probs(self.config, has_reference=self.reference is not None):
            rows = rows.with_columns(old_log_probs=self._policy_log_probs(rows))
        if self.reference is not None:
            rows = rows.with_columns(ref_log_probs=self._compute_column(rows, self.reference, self._log_probs))
        values = kl = None
        if self.critic is not None:
            rows = rows.with_columns(old_values=self._compute_column(rows, self.critic.model, token_values))
            values = pad(batch, rows["old_values"])
        if algorithm.use_kl_in_reward and self.reference is not None:
            kl = pad(batch, rows["old_log_probs"] - rows["ref_log_probs"])
        mask = pad(batch, rows["loss_mask"])
        leave_out = partial(measure_paths, batch, rows, compute=self._policy_log_probs)
        advantages = estimate_advantages(
            batch, algorithm, self.objectives.advantage, mask=mask, kl=kl, values=values, leave_out=leave_out
        )
        self.advantages = advantages.values
        rows = rows.with_columns(advantages=unpad(batch, advantages.values))
        rows = rows.with_columns(measured=find_measured(rows, all_rows=isinstance(self.objectives.loss, ColumnLoss)))
        metrics = {
            "actor/trained_tokens": float(mask.sum()),
            "actor/trained_rows": float((mask.sum(1) > 0).sum()),
            "actor/measured_tokens": float(rows["measured"].sum()),
        }
        if advantages.returns is not None:
            rows = rows.with_columns(returns=unpad(batch, advantages.returns))
            metrics["critic/return"] = float(rows["returns"][rows.targets].mean()) if len(rows.targets) else 0.0
        return rows, metrics

    def _log_probs(self, model: object, micro: MicroBatch) -> Tensor:
        with self.replays.running(micro, active=model is self.policy.model):
            return token_log_probs(model, micro, self.temperature, chunk=self.sizes.logits_chunk)[0]

    def _policy_log_probs(self, rows: TokenRows) -> Tensor:
        return self._compute_column(rows, self.policy.model, self._log_probs)

    @torch.no_grad()
    def _compute_column(
        self, rows: TokenRows, model: object, compute: Callable[[Any, MicroBatch], Tensor], timed: str = "log_probs"
    ) -> Tensor:
        """Return (N,) a model's outputs on the tokens in the loss, computed by all processes together; 0 elsewhere."""
        column = torch.zeros(rows.num_tokens)
        with self._meter.stage(timed), self._autocast(), without_dropout(model):
            for micro, counts in self._packing.micro_batches(
                rows, self._packing.plan(rows, self.world_size), self.rank
            ):
                values = compute(model, micro.to(self.device)).cpu()
                if counts:
                    column[micro.tokens] = values
        return self._all_reduce(column)

    # The optimizer steps

    def _train_epochs(self, rows: TokenRows, parts: Sequence[MiniBatch], step: int, version: int) -> dict[str, float]:
        """Train on the mini-batches, in every epoch, until the policy has moved by `target_kl`; return metrics."""
        before, epochs = rows.columns.get("old_log_probs"), self.config.algorithm.ppo_epochs
        metrics: dict[str, float] = {}
        done: list[StepMetrics] = []
        meter = NoiseMeter(self.policy.model, self._all_reduce) if self.config.diagnostics.noise_scale else None
        for number, part in enumerate([*parts] * epochs):
            found, log_probs = self._train_mini_batch(part, step, meter)
            if number == 0:
                compared = (part.rows, log_probs) if before is None else (rows, before)
                metrics |= gap_metrics(*compared, version)
            done.append(found)
            if self._moved_enough(found):
                break
        stopped = self._moved_enough(done[-1])
        metrics |= average(done[:-1] if stopped else done)
        metrics |= count_tokens(done)
        metrics["actor/approx_kl"] = max(each.approx_kl for each in done)
        if self.config.algorithm.target_kl is not None:
            metrics["actor/skipped"] = 1 - (len(done) - stopped) / (len(parts) * epochs)
        if meter is not None:
            metrics |= self._noise_metrics(meter, parts)
        return metrics | self._shift_metrics(*compared)

    def _moved_enough(self, found: StepMetrics) -> bool:
        """Return whether the policy had moved by `target_kl` before a mini-batch; the same in every process."""
        limit = self.config.algorithm.target_kl
        return limit is not None and found.approx_kl > limit

    def _noise_metrics(self, meter: NoiseMeter, parts: Sequence[MiniBatch]) -> dict[str, float]:
        with self._meter.stage("diagnostics"):
            noise = meter.estimate()
        if noise is None:
            return {}
        return {"noise/signal": noise.signal, "noise/trace": noise.trace, "noise/batch": parts[0].num_groups}

    def _shift_metrics(self, rows: TokenRows, old: Tensor) -> dict[str, float]:
        """Compare (N,) log-probabilities before the update with those after it, on some of the rows."""
        measured = rows.with_columns(old=old, loss_mask=rows["measured"])
        sample = spread_rows(measured, self.config.diagnostics.sequences)
        if not len(sample):
            return {}
        new = self._compute_column(sample, self.policy.model, self._log_probs, timed="diagnostics")
        return shift_metrics(sample, sample["old"], new)

    def _train_mini_batch(self, part: MiniBatch, step: int, meter: NoiseMeter | None) -> tuple[StepMetrics, Tensor]:
        """
        Make one optimizer step on a mini-batch, unless the policy has moved by `target_kl` before.

        Returns:
            Metrics; and the (N,) log-probabilities before the step of the tokens that were computed, which include all
            measured ones.
        """
        rows, targets = part.rows, part.rows.targets
        log_probs = torch.zeros(rows.num_tokens)
        metrics = StepMetrics(int(rows["measured"].sum()))
        if not len(targets):
            return metrics, log_probs
        weights = torch.zeros(rows.num_tokens)
        weights[targets] = token_weights(
            rows["sequence"][targets], self.config.algorithm.agg_mode, response_length=self.response_length
        )
        # The token weights are those of all rows, so leaving some out does not change the gradient.
        rows = rows.with_columns(weights=weights)
        rows = rows if needs_all_rows(self.config, has_critic=self.critic is not None) else drop_unmeasured(rows)
        shares = part.shares if meter is not None else [Share(range(len(rows)), part.num_groups)]
        for number, share in enumerate(shares, 1):
            with self._meter.stage("forward_backward"):
                plan = self._packing.plan(rows, self.world_size, share.rows)
                metrics.forwarded_tokens += plan.forwarded_tokens
                metrics.row_tokens += plan.row_tokens
                for micro, counts in self._packing.micro_batches(rows, plan, self.rank):
                    # FSDP averages gradients over the processes, but the loss is their sum.
                    scale = float(counts) * self.world_size
                    log_probs[micro.tokens] += self._backward(rows, micro, scale, metrics)
            if meter is not None:
                with self._meter.stage("diagnostics"):
                    meter.add_share(share.num_groups, is_last=number == len(shares))
        if meter is not None:
            meter.end_mini_batch()
        metrics.reduce(self._all_reduce)
        if self._moved_enough(metrics):
            self._clear_gradients()
        else:
            self._step(metrics.others, step)
        return metrics, self._all_reduce(log_probs)

    def _step(self, metrics: dict[str, float], step: int) -> None:
        with self._meter.stage("optimizer"):
            if self.critic is None or step > self.config.critic.warmup_steps:
                wanted = self.config.optimizer.noise_adaptive or self.config.diagnostics.noise_scale
                agreement = self.policy.multiply_with_momentum() if wanted else None
                norm = metrics["actor/grad_norm"] = self.policy.step()
                if agreement is not None:
                    metrics |= {"noise/agreement": float(self._all_reduce(agreement)), "noise/square": norm**2}
            else:
                self.policy.optimizer.zero_grad()
                metrics["actor/grad_norm"] = 0.0
            if self.critic is not None:
                metrics["critic/grad_norm"] = self.critic.step()

    def _clear_gradients(self) -> None:
        for trainable in filter(None, (self.policy, self.critic)):
            trainable.optimizer.zero_grad()

    def _backward(self, rows: TokenRows, micro: MicroBatch, scale: float, metrics: StepMetrics) -> Tensor:
        """Accumulate gradients and metrics; return (M,) log-probabilities, 0 for a micro-batch that does not count."""
        local = micro.to(self.device)
        algorithm = self.config.algorithm
        columns = loss_inputs(rows, micro.tokens, self.device)
        labels = find_labels(self.objectives.loss, local.labels, columns)
        kind: Entropy = "gradient" if algorithm.entropy_coeff != 0 else "value"
        model, chunk = self.policy.model, self.sizes.logits_chunk
        with self.replays.running(local):
            with self._autocast():
                each, entropy = token_log_probs(
                    model, local, self.temperature, entropy=kind, chunk=chunk, labels=labels
                )
            log_probs = split_log_probs(each, columns)
            weights = columns["weights"]
            loss, surrogate, values = policy_loss(algorithm, self.objectives.loss, columns, log_probs, entropy)
            torch.autograd.backward(scale * (weights * loss).sum())
        others = {"actor/pg_loss": (weights * surrogate).sum()}
        if self.critic is not None:
            with self._autocast():
                found = token_values(self.critic.model, local)
            errors = value_loss(found, columns["old_values"], columns["returns"], self.config.critic.cliprange_value)
            torch.autograd.backward(scale * (weights * errors).sum())
            others["critic/value_loss"] = (weights * errors).sum()
        # A micro-batch that fills the place of a missing one counts nothing, but has the names, see `reduce`.
        counted = float(scale > 0)
        chosen = columns["measured"].bool() & (scale > 0)
        metrics.add(chosen, values, {name: value * counted for name, value in others.items()})
        return log_probs.detach().cpu() * counted

    # Processes

    @property
    def _packing(self) -> Packing:
        return Packing(self.sizes.micro_batch_tokens, self.config.policy.packed, self.sharing)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.world_size > 1:
            on_device = tensor.to(self.device)
            dist.all_reduce(on_device)
            return on_device.cpu()
        return tensor

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.policy.autocast)
