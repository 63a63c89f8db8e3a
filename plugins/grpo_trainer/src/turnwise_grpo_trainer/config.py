"""
The `train` section of a run config.

Names and defaults follow the literature, verl and TRL; `advantages` and `losses` cite the papers.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen, validators
from attrs.converters import optional

from turnwise.config.parts import Choice
from turnwise_engine_support.devices import MOST_THREADS

Mode = Literal["sync", "async"]
Level = Literal["token", "row"]
KlType = Literal["k1", "k2", "k3"]
LossSequence = Literal["episode", "row"]
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def _number(default: float, *checks: Any) -> Any:
    return field(default=default, validator=checks)


def _optional(default: float | None, *checks: Any) -> Any:
    return field(default=default, validator=validators.optional(validators.and_(*checks)))


def _as_choice(value: Choice | str) -> Choice:
    return Choice(value) if isinstance(value, str) else value


def _is_interval(_instance: object, attribute: Any, value: tuple[float, float]) -> None:
    if not 0 <= value[0] < value[1]:
        raise ValueError(f"'{attribute.name}' must be two rising numbers from 0: {list(value)}")


def _are_shares(_instance: object, attribute: Any, value: tuple[float, float]) -> None:
    if not all(0 <= each < 1 for each in value):
        raise ValueError(f"'{attribute.name}' must be two numbers from 0 to below 1: {list(value)}")


def _at_least(bound: float) -> Any:
    return validators.ge(bound)


@frozen(kw_only=True)
class OverlongConfig:
    """
    The soft overlong punishment of DAPO (arXiv:2503.14476, equation 13).

    An episode of several rows has the punishment of its longest row. `reinforce_plus_plus` and `gae` take each row of
    expanded parallel paths as a separate line: there, each row has its own punishment, and short rows have none.

    Attributes:
        cache_length: L_cache: the punishment grows from 0 to -1 over the last tokens below the limit.
        max_length: L_max in response tokens; null is `rollout.response_length`, at which episodes are truncated.
        factor: weight of the punishment beside the reward.
    """

    cache_length: int = field(validator=_at_least(1))
    max_length: int | None = _optional(None, _at_least(1))
    factor: float = _number(1.0, validators.gt(0))


@frozen(kw_only=True)
class AlgorithmConfig:
    """
    From rewards to a loss.

    Attributes:
        adv_estimator: `grpo`, `dr_grpo` (no division by the standard deviation, constant length normalisation), `rloo`,
            `reinforce_plus_plus`, `gae`, which trains a critic, or the name of a registered one.
        gamma: discount of `reinforce_plus_plus` and `gae`.
        lam: lambda of `gae`.
        clip_ratio_low: the probability ratio is clipped below 1 minus this.
        clip_ratio_high: the probability ratio is clipped above 1 plus this; DAPO's clip-higher is 0.28.
        loss_agg_mode: how token losses are averaged; null is `seq-mean-token-sum-norm` for `dr_grpo`, else
            `token-mean`.
        loss_sequence: the sequence of the `seq-mean` modes. With `episode`, all rows of an episode are one sequence, so
            an agent that splits its episode into more records does not weigh more; `row` is as in verl.
        kl_loss_coef: weight of the KL to the reference, which is the initial model; 0 loads no reference.
        kl_loss_type: estimator of that KL. The gradient of k1 is 0 on average; use it with `use_kl_in_reward`.
        use_kl_in_reward: subtract the KL (k1) from each token's reward instead of adding it to the loss.
        entropy_coeff: weight of an entropy bonus.
        ppo_epochs: passes over a step's batch.
        ppo_mini_batch_size: episodes of one optimizer step; null is the whole batch.
        target_kl: once the mean KL of a token between the policy before the update and the current one (k3, on a
            mini-batch before its step) exceeds this, the step's remaining mini-batches are skipped; null never skips.
            It needs a forward pass before the update also with `old_log_probs: rollout`, and `lora.dropout: 0`.
        old_log_probs: denominator of the probability ratio: log-probabilities that the trainer computes before the
            update (`recompute`), or the engine's (`rollout`).
        tis_imp_ratio_cap: cap of the truncated importance weights between trainer and rollout; null disables them.
        tis_level: a weight for each `token`, or one for a `row`: the product of its tokens' ratios.
        mis_bounds: lowest and highest importance ratio of what is trained; the rest is masked. Null masks nothing.
        mis_level: the ratio that `mis_bounds` bounds: of each `token`, or the geometric mean over a `row`.
        norm_adv: normalise the advantages of `gae` to mean 0 and variance 1.
        mask_truncated: exclude truncated rows from the loss (DAPO's overlong filtering).
        overlong: a soft punishment of long responses; null punishes none.
    """

    adv_estimator: Choice = field(default=Choice("grpo"), converter=_as_choice)
    gamma: float = _number(1.0, _at_least(0), validators.le(1))
    lam: float = _number(0.95, _at_least(0), validators.le(1))
    clip_ratio_low: float = _number(0.2, validators.gt(0), validators.le(1))
    clip_ratio_high: float = _number(0.2, validators.gt(0))
    loss_agg_mode: LossAggMode | None = None
    loss_sequence: LossSequence = "episode"
    kl_loss_coef: float = _number(0.0, _at_least(0))
    kl_loss_type: KlType = "k3"
    use_kl_in_reward: bool = False
    entropy_coeff: float = 0.0
    ppo_epochs: int = _number(1, _at_least(1))
    ppo_mini_batch_size: int | None = _optional(None, _at_least(1))
    target_kl: float | None = _optional(None, validators.gt(0))
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    tis_imp_ratio_cap: float | None = _optional(2.0, validators.gt(0))
    tis_level: Level = "token"
    mis_bounds: tuple[float, float] | None = field(default=None, validator=validators.optional(_is_interval))
    mis_level: Level = "row"
    norm_adv: bool = True
    mask_truncated: bool = False
    overlong: OverlongConfig | None = None

    @property
    def agg_mode(self) -> LossAggMode:
        """`loss_agg_mode`, or the estimator's default if it is null."""
        if self.loss_agg_mode is not None:
            return self.loss_agg_mode
        return "seq-mean-token-sum-norm" if self.adv_estimator.name == "dr_grpo" else "token-mean"


@frozen(kw_only=True)
class OptimizerConfig:
    """
    AdamW and its schedule.

    Attributes:
        lr: the highest learning rate.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW.
        grad_clip: largest norm of the gradient; null disables clipping.
        lr_schedule: after the warm-up: `constant`, or `linear` or `cosine`, which fall to `min_lr_ratio` at the step
            after the last.
        warmup_steps: steps in which the learning rate rises from 0.
        min_lr_ratio: the end of a falling schedule, as a share of `lr`.
        noise_adaptive: multiply the learning rate by `noise/cosine`, the expected cosine between the gradient of a
            mini-batch and the true one. AdamW's steps are equally long for any gradient, and the best length is
            proportional to this cosine. So rewards without a signal hardly change the model. It needs no warm-up.
    """

    lr: float = _number(1e-6, _at_least(0))
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=_are_shares)
    eps: float = _number(1e-8, validators.gt(0))
    weight_decay: float = _number(0.01, _at_least(0))
    grad_clip: float | None = _optional(1.0, validators.gt(0))
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = _number(0, _at_least(0))
    min_lr_ratio: float = _number(0.0, _at_least(0), validators.le(1))
    noise_adaptive: bool = False


@frozen(kw_only=True)
class PolicyConfig:
    """
    Options of the model's computation; the section `model` of the run names the model.

    Attributes:
        dtype: data type of the trained weights.
        autocast: compute in bfloat16, but keep weights and optimizer states in `dtype`.
        device: any torch device; `auto` is a GPU if there is one, else the CPU.
        attn_implementation: as in transformers. Rows with parallel paths need one that accepts a dense mask (`sdpa`,
            `eager`) or `turnwise_segments`; flash attention does not support them.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        packed: concatenate rows to one sequence; false pads them. Both give the same gradients.
        freeze_vision: train no weight and no adapter of the vision tower of a vision-language model.
        share_prefixes: compute a prefix that several rows of a forward pass share once, where this costs less than
            separate rows. The gradients are the same. A log line says so if the model cannot.
        max_tokens_per_micro_batch: most tokens in one forward pass of a process, including pads and the patches of
            pictures. Null is 8192, but on a
            CPU at most as many as keep 0.25 GiB for the backward pass, measured when the model is loaded.
        logits_mib: MiB of the float32 logits that are in memory at once; the output head is then computed chunk by
            chunk, and again in the backward pass. Null is 32 on a CPU and 512 elsewhere. 0 computes all logits of a
            forward pass together, for models that change the logits after their output head.
        num_threads: torch threads of a training process; null is torch's default.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    autocast: bool = False
    device: str = "auto"
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    packed: bool = False
    freeze_vision: bool = False
    share_prefixes: bool = True
    max_tokens_per_micro_batch: int | None = _optional(None, _at_least(1))
    logits_mib: float | None = _optional(None, _at_least(0))
    num_threads: int | None = _optional(None, _at_least(1), validators.le(MOST_THREADS))


@frozen(kw_only=True)
class LoraConfig:
    """
    LoRA (arXiv:2106.09685) with peft: the policy is the frozen model plus trained adapters of low rank.

    Attributes:
        rank: r, the rank of an adapter.
        alpha: adapters are scaled by alpha / rank.
        dropout: of the input of adapters, in the update only; old and reference log-probabilities have none.
        target_modules: ends of the names of the adapted modules, such as `[q_proj, v_proj]`; `[all-linear]` adapts all
            linear modules except the output head.
        sync: the engine gets the `adapters` alone, or whole `merged` weights; `auto` sends adapters if the engine
            applies them (`transformers` does) and keeps its weights asleep.
    """

    rank: int = _number(16, _at_least(1))
    alpha: float = _number(32.0, validators.gt(0))
    dropout: float = _number(0.0, _at_least(0), validators.lt(1))
    target_modules: tuple[str, ...] = field(default=("all-linear",), validator=validators.min_len(1))
    sync: Literal["auto", "adapters", "merged"] = "auto"


@frozen(kw_only=True)
class CriticConfig:
    """
    The critic of `gae`: the policy's model with a value head.

    Attributes:
        lr: its learning rate.
        cliprange_value: largest change of a value in one update.
        warmup_steps: first steps, in which only the critic is trained.
    """

    lr: float = _number(1e-5, _at_least(0))
    cliprange_value: float = _number(0.5, validators.gt(0))
    warmup_steps: int = _number(0, _at_least(0))


@frozen(kw_only=True)
class BufferConfig:
    """
    The buffer between rollout and trainer.

    Attributes:
        dynamic_sampling: drop groups whose rewards are all equal, and roll out more tasks instead (DAPO,
            arXiv:2503.14476).
        max_refills: how often a step may request more tasks before it continues with fewer groups.
        max_groups: most groups in the buffer; the rollout pauses while it is full. Null is twice `tasks_per_step`.
        max_staleness: most weight versions that a group may be behind the trainer.
        stale: `drop` a group that is further behind, or `correct` it: keep it, and let the importance weights correct
            it.
    """

    dynamic_sampling: bool = False
    max_refills: int = _number(2, _at_least(0))
    max_groups: int | None = _optional(None, _at_least(1))
    max_staleness: int = _number(1, _at_least(0))
    stale: Literal["drop", "correct"] = "drop"


@frozen(kw_only=True)
class CheckpointConfig:
    """
    Checkpoints.

    Attributes:
        every: steps between checkpoints; 0 writes one only after the last step, which always has one.
        keep_last: how many checkpoints are kept; older ones are removed.
        keep_best: write a checkpoint after each validation with a new best score, and keep the best one however old.
        export: the checkpoint that becomes `model/` at the end: of the `last` step, or of the `best` one, which may be
            the initial model.
    """

    every: int = _number(0, _at_least(0))
    keep_last: int = _number(2, _at_least(1))
    keep_best: bool = True
    export: Literal["last", "best"] = "last"


@frozen(kw_only=True)
class ValidationConfig:
    """
    Validation on held-out tasks (`data.validation_path`).

    Attributes:
        every: steps between validations; 0 validates only before the first and after the last step.
        limit: most tasks; null uses all.
        score: the metric that tells the best step; higher is better.
        patience: the training stops after this many validations in a row without a new best score; null never stops it
            early.
    """

    every: int = _number(0, _at_least(0))
    limit: int | None = _optional(None, _at_least(1))
    score: str = "reward/mean"
    patience: int | None = _optional(None, _at_least(1))


@frozen(kw_only=True)
class EpisodesConfig:
    """
    Files of the episodes that the training learned from, with their advantages, and of held-out episodes.

    Attributes:
        every: steps between files, from the first step; each validation has a file too. 0 writes none.
    """

    every: int = _number(1, _at_least(0))


@frozen(kw_only=True)
class DiagnosticsConfig:
    """
    Measurements that tell whether a training learns.

    Attributes:
        noise_scale: measure the gradient noise scale and cosine, which keeps half a copy of the gradients.
        sequences: rows of each batch on which the new policy is compared with the old one after the update; 0 compares
            none.
    """

    noise_scale: bool = True
    sequences: int = _number(16, _at_least(0))


@frozen(kw_only=True)
class ShardingConfig:
    """
    Training processes that shard the model (FSDP2).

    Attributes:
        num_processes: Ray actors that train; 1 trains in this process, without Ray.
        fully_shard: shard the model with `fully_shard`; null shards it if there is more than one process.
        gpus_per_process: GPUs that Ray reserves for each process; null is 1 on a GPU, else 0.
        cpus_per_process: CPUs that Ray reserves for each process.
        num_threads: torch threads of each process; null is torch's default.
    """

    num_processes: int = _number(1, _at_least(1))
    fully_shard: bool | None = None
    gpus_per_process: float | None = _optional(None, _at_least(0))
    cpus_per_process: float = _number(1.0, _at_least(0))
    num_threads: int | None = _optional(None, _at_least(1), validators.le(MOST_THREADS))

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded."""
        return self.num_processes > 1 if self.fully_shard is None else self.fully_shard


@frozen(kw_only=True)
class TrainConfig:
    """
    The `train` section.

    Attributes:
        num_steps: number of steps; each trains on one batch and then updates the engine's weights.
        tasks_per_step: groups of a batch; `rollout.n` is the size of a group.
        mode: `sync` rolls out and trains in turns, `async` at the same time. `memory.mode` of the run says whether
            engine and trainer share devices; only `sync` can.
        shuffle_rewards: permute the rewards of each batch: a control that must not learn.
        algorithm: from rewards to a loss.
        loss: a registered loss in place of PPO's clipped one: `dual_clip`, `gspo`, `cispo`, or another plugin's.
        scorers: fill open columns of the episodes of a step before its update, in this order, for its loss.
        replays: make the policy's forward passes follow open columns of the engine, such as the experts that it chose.
        optimizer: AdamW and its schedule.
        policy: options of the model's computation.
        lora: train adapters of low rank in place of all weights; null trains all.
        critic: the critic of `gae`.
        buffer: between rollout and trainer.
        checkpoint: checkpoints.
        validation: validation on held-out tasks.
        episodes: files of the episodes of a step.
        diagnostics: measurements that tell whether a training learns.
        sharding: training processes that shard the model.
    """

    num_steps: int = _number(100, _at_least(1))
    tasks_per_step: int = _number(16, _at_least(1))
    mode: Mode = "sync"
    shuffle_rewards: bool = False
    algorithm: AlgorithmConfig = field(factory=AlgorithmConfig)
    loss: Choice | None = field(default=None, converter=optional(_as_choice))
    scorers: tuple[Choice, ...] = ()
    replays: tuple[Choice, ...] = ()
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    policy: PolicyConfig = field(factory=PolicyConfig)
    lora: LoraConfig | None = None
    critic: CriticConfig = field(factory=CriticConfig)
    buffer: BufferConfig = field(factory=BufferConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    validation: ValidationConfig = field(factory=ValidationConfig)
    episodes: EpisodesConfig = field(factory=EpisodesConfig)
    diagnostics: DiagnosticsConfig = field(factory=DiagnosticsConfig)
    sharding: ShardingConfig = field(factory=ShardingConfig)
