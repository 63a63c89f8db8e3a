"""
The `train` section of a run config.

Names and defaults are those of the literature and of verl and TRL where these have them; the papers stand in the
docstrings of `advantages` and `losses`.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen, validators

AdvEstimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae"]
Mode = Literal["sync", "hybrid", "async"]
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def _number(default: float, *checks: Any) -> Any:
    return field(default=default, validator=checks)


def _optional(default: float | None, *checks: Any) -> Any:
    return field(default=default, validator=validators.optional(validators.and_(*checks)))


def _at_least(bound: float) -> Any:
    return validators.ge(bound)


@frozen(kw_only=True)
class AlgorithmConfig:
    """
    From rewards to a loss.

    Attributes:
        adv_estimator: `grpo`, `dr_grpo` (no division by the standard deviation, constant norm of length), `rloo`,
            `reinforce_plus_plus`, or `gae`, which trains a critic.
        gamma: discount of `reinforce_plus_plus` and `gae`.
        lam: lambda of `gae`.
        clip_ratio_low: how far below 1 the probability ratio may count.
        clip_ratio_high: how far above 1; 0.28 is DAPO's clip-higher.
        loss_agg_mode: how tokens make a loss; null is `seq-mean-token-sum-norm` for `dr_grpo`, else `token-mean`.
        kl_loss_coef: weight of the KL to the reference, the model that training began with; 0 keeps no reference.
        kl_loss_type: estimator of that KL. The gradient of k1 is 0 on average: it is for `use_kl_in_reward`.
        use_kl_in_reward: take the KL (k1) off each token's reward instead of adding it to the loss.
        entropy_coeff: weight of an entropy bonus.
        ppo_epochs: passes over a step's batch.
        ppo_mini_batch_size: rows of one optimizer step; null is the whole batch.
        old_log_probs: what the probability ratio is over: those that the trainer computes before the update
            (`recompute`), or those of the rollout.
        tis_imp_ratio_cap: cap of the truncated importance weights between trainer and rollout; null leaves them out.
        norm_adv: give the advantages of `gae` mean 0 and variance 1.
        mask_truncated: leave rows out of the loss that a budget cut short.
    """

    adv_estimator: AdvEstimator = "grpo"
    gamma: float = _number(1.0, _at_least(0), validators.le(1))
    lam: float = _number(0.95, _at_least(0), validators.le(1))
    clip_ratio_low: float = _number(0.2, validators.gt(0), validators.le(1))
    clip_ratio_high: float = _number(0.2, validators.gt(0))
    loss_agg_mode: LossAggMode | None = None
    kl_loss_coef: float = _number(0.0, _at_least(0))
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    use_kl_in_reward: bool = False
    entropy_coeff: float = 0.0
    ppo_epochs: int = _number(1, _at_least(1))
    ppo_mini_batch_size: int | None = _optional(None, _at_least(1))
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    tis_imp_ratio_cap: float | None = _optional(2.0, validators.gt(0))
    norm_adv: bool = True
    mask_truncated: bool = False

    @property
    def agg_mode(self) -> LossAggMode:
        """The way tokens are averaged that is in force."""
        if self.loss_agg_mode is not None:
            return self.loss_agg_mode
        return "seq-mean-token-sum-norm" if self.adv_estimator == "dr_grpo" else "token-mean"


@frozen(kw_only=True)
class OptimizerConfig:
    """
    AdamW and its schedule.

    Attributes:
        lr: learning rate at its highest.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        grad_clip: largest norm of the gradient; null clips nothing.
        lr_schedule: after the warm-up: `constant`, or `linear` or `cosine` down to `min_lr_ratio`, which the step
            after the last would have.
        warmup_steps: steps in which the rate rises from 0.
        min_lr_ratio: where a falling schedule ends, as a share of `lr`.
    """

    lr: float = _number(1e-6, _at_least(0))
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = _number(1e-8, validators.gt(0))
    weight_decay: float = _number(0.01, _at_least(0))
    grad_clip: float | None = _optional(1.0, validators.gt(0))
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = _number(0, _at_least(0))
    min_lr_ratio: float = _number(0.0, _at_least(0), validators.le(1))


@frozen(kw_only=True)
class PolicyConfig:
    """
    How the model is trained; which model is `model` of the run.

    Attributes:
        dtype: of the weights that are trained.
        autocast: compute in bfloat16 and keep weights and optimizer in `dtype`.
        device: any device of torch; `auto` is a GPU when there is one.
        attn_implementation: of transformers. Rows with parallel paths need `sdpa`, `eager`, or one that reads a dense
            mask; flash attention does not.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        packed: rows end to end in one sequence; false pads them. Both give the same gradients.
        max_tokens_per_micro_batch: most tokens of one forward pass and process, pads included.
        num_threads: threads of torch in a process that trains; null is torch's own choice.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    autocast: bool = False
    device: str = "auto"
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    packed: bool = False
    max_tokens_per_micro_batch: int = _number(8192, _at_least(1))
    num_threads: int | None = _optional(None, _at_least(1))


@frozen(kw_only=True)
class CriticConfig:
    """
    The critic of `gae`: the policy's model with a value head.

    Attributes:
        lr: its learning rate.
        cliprange_value: how far a value may move in one update.
        warmup_steps: first steps in which only the critic learns.
    """

    lr: float = _number(1e-5, _at_least(0))
    cliprange_value: float = _number(0.5, validators.gt(0))
    warmup_steps: int = _number(0, _at_least(0))


@frozen(kw_only=True)
class BufferConfig:
    """
    Where finished groups wait for the trainer.

    Attributes:
        dynamic_sampling: drop groups whose rewards are all the same, and roll out more tasks in their place (DAPO,
            arXiv:2503.14476).
        max_refills: how often a step may ask for more tasks before it goes on with what it has.
        max_groups: groups that may wait; the rollout pauses when it is full. Null is two steps' worth.
        max_staleness: weight versions that a group may be behind the trainer.
        stale: `drop` a group that is further behind, or `correct` it: keep it, and let the importance weights count it.
    """

    dynamic_sampling: bool = False
    max_refills: int = _number(2, _at_least(0))
    max_groups: int | None = _optional(None, _at_least(1))
    max_staleness: int = _number(1, _at_least(0))
    stale: Literal["drop", "correct"] = "drop"


@frozen(kw_only=True)
class CheckpointConfig:
    """
    What survives the process.

    Attributes:
        every: steps between checkpoints; the last step has one in any case. 0 writes only that one.
        keep_last: checkpoints that stay; older ones are removed.
    """

    every: int = _number(0, _at_least(0))
    keep_last: int = _number(2, _at_least(1))


@frozen(kw_only=True)
class ValidationConfig:
    """
    Held-out tasks (`data.validation_path`) before, during and after training.

    Attributes:
        every: steps between validations besides the first and the last; 0 has only these.
        limit: most tasks; null takes all.
    """

    every: int = _number(0, _at_least(0))
    limit: int | None = _optional(None, _at_least(1))


@frozen(kw_only=True)
class ShardingConfig:
    """
    Processes that share the model (FSDP2).

    Attributes:
        num_processes: Ray actors that train; 1 trains in this process, without Ray.
        fully_shard: shard the model with `fully_shard`; null does when there is more than one process.
        gpus_per_process: GPUs that Ray reserves for each; null is 1 on a GPU and 0 elsewhere.
        cpus_per_process: CPUs that Ray reserves for each.
        num_threads: threads of torch in each process; null leaves them alone.
    """

    num_processes: int = _number(1, _at_least(1))
    fully_shard: bool | None = None
    gpus_per_process: float | None = _optional(None, _at_least(0))
    cpus_per_process: float = _number(1.0, _at_least(0))
    num_threads: int | None = _optional(None, _at_least(1))

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded."""
        return self.num_processes > 1 if self.fully_shard is None else self.fully_shard


@frozen(kw_only=True)
class TrainConfig:
    """
    The `train` section.

    Attributes:
        num_steps: weight updates of the engine, each from one batch.
        tasks_per_step: groups of a batch; `rollout.n` is the size of a group.
        mode: `sync` rolls out and trains in turns. `hybrid` does so on the same devices: engine and trainer take the
            memory in turns. `async` does both at once.
        shuffle_rewards: give every episode the reward of another one of its batch: a control that must not learn.
        algorithm: from rewards to a loss.
        optimizer: AdamW and its schedule.
        policy: how the model is trained.
        critic: of `gae`.
        buffer: where groups wait.
        checkpoint: what survives the process.
        validation: held-out tasks.
        sharding: processes that share the model.
    """

    num_steps: int = _number(100, _at_least(1))
    tasks_per_step: int = _number(16, _at_least(1))
    mode: Mode = "sync"
    shuffle_rewards: bool = False
    algorithm: AlgorithmConfig = field(factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    policy: PolicyConfig = field(factory=PolicyConfig)
    critic: CriticConfig = field(factory=CriticConfig)
    buffer: BufferConfig = field(factory=BufferConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    validation: ValidationConfig = field(factory=ValidationConfig)
    sharding: ShardingConfig = field(factory=ShardingConfig)
