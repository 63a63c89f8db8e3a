"""The metrics that a training logs, by name; the reference pages list them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TRAINING_METRICS: Final[Mapping[str, str]] = {
    "reward/mean": "Mean reward of the scored episodes.",
    "reward/std": "Standard deviation of the rewards.",
    "reward/stderr": "Standard error of the mean reward, over tasks: episodes of one task are not independent.",
    "reward/scored": "Share of the episodes with a score.",
    "overlong/*": "Soft overlong punishment: its `mean` over the scored episodes, and the `share` of them that got one;"
    " only with `algorithm.overlong`. `reward/` metrics are without it.",
    "length/*": "Response tokens of an episode: `mean`, `max`.",
    "turns/mean": "Turns of an episode.",
    "tools/*": "Tool calls: `per_episode`; `share` of episodes with a call; `errors` per episode.",
    "status/*": "Share of the episodes with a status, such as `completed`.",
    "limit/*": "Share of the episodes that a limit truncated, by its name, such as `rollout.response_length`.",
    "groups/varied": "Share of the groups with two scored episodes or more whose rewards differ; a group without"
    " variance has no advantage other than 0.",
    "source/*": "Of each `data_source`, if there are several: the `share` of the episodes, and their mean `reward`.",
    "records/untrained": "Records without rows.",
    "tokens/action": "Sampled tokens of the batch.",
    "tokens/per_s": "Sampled tokens per second of the step.",
    "actor/trained_tokens": "Tokens in the loss.",
    "actor/trained_rows": "Rows with a token in the loss.",
    "actor/measured_tokens": "Tokens that the means over tokens cover, here and in `importance/`, `gap/` and `policy/`:"
    " the tokens in the loss whose rows have an advantage. Groups with equal rewards have none; if no row has one,"
    " these are the tokens of the first row. The loss and its options do not change them, except that a loss that reads"
    " columns, such as those of a teacher, has all tokens in the loss measured.",
    "actor/pg_loss": "Policy loss, the mean over the mini-batches.",
    "actor/clip_frac": "Share of the measured tokens whose gradient the clip stopped.",
    "actor/entropy": "Entropy of the policy in nats, the mean over the measured tokens.",
    "actor/approx_kl": "KL of a measured token from the policy before the update to the current one (k3), measured on"
    " each mini-batch before its step: the largest. `target_kl` is its bound. With `old_log_probs: rollout` and no"
    " `target_kl`, it is the KL from the rollout's policy.",
    "actor/skipped": "Share of the mini-batches that `target_kl` skipped; only with `target_kl`.",
    "actor/grad_norm": "Norm of the gradient before clipping.",
    "actor/kl": "KL to the reference, the mean over the measured tokens; only with a reference.",
    "actor/tis_*": "Truncated importance weights: `tis_mean`, and `tis_capped`, the share at the cap.",
    "actor/mis_masked": "Share of the measured tokens that `mis_bounds` masked; only with `mis_bounds`.",
    "actor/dual_clip_frac": "Share of the measured tokens whose loss the dual clip bounded; only with"
    " `loss: dual_clip`.",
    "actor/lr": "Learning rate.",
    "update/forwarded_tokens": "Tokens of the policy's forward and backward passes, pads too, in all processes.",
    "update/row_tokens": "Tokens of the rows in these passes. With shared prefixes they are more than the forwarded"
    " ones.",
    "critic/*": "Of `gae`: `value_loss`, `grad_norm`, and `return`, the mean target.",
    "policy/kl": "KL of a token from the policy before the update to the one after it (k3), measured after the update"
    " on the measured tokens of up to `diagnostics.sequences` rows. With `old_log_probs: rollout`, mini-batches and no"
    " `target_kl`, these are rows of the first mini-batch.",
    "policy/nats": "The same KL summed over a row, the mean over rows: how far the step moved the policy, in nats a"
    " sequence.",
    "importance/ess": "Effective sample size of the importance weights between trainer and rollout, as a share of the"
    " measured tokens (Kish): 1 if all weights are equal.",
    "replay/*": "Share of the tokens of the batch that have a value of a replayed column; others compute as without"
    " replay, such as the last token of an episode. Only with `replays`.",
    "noise/scale": "Gradient noise scale in groups: `trace` over `signal`, both averaged over the steps with decay 0.9."
    " Infinite (null in the file) if no signal was found.",
    "noise/signal": "Unbiased estimate of the squared length of the true gradient; single steps can be negative.",
    "noise/trace": "Unbiased estimate of the variance of one group's gradient, summed over the weights.",
    "noise/batch": "Groups in a mini-batch.",
    "noise/agreement": "Product of a mini-batch's gradient with the mean of the gradients before it, which is"
    " AdamW's first moment.",
    "noise/square": "Squared length of a mini-batch's gradient.",
    "noise/cosine": "Expected cosine between a mini-batch's gradient and the true one: the root of `agreement` over"
    " `square`, averaged over the steps with decay 0.9, minus the standard error of this average.",
    "gap/*": "Difference between the log-probabilities of trainer and rollout: `mean`, `max`, `max_relative`, `kl`; the"
    " compared `tokens`, and the `fresh` share of the measured tokens that the current weights sampled. If there are"
    " fresh ones, only these are compared. With `old_log_probs: rollout` and mini-batches, only those of the first"
    " mini-batch are, because no pass over the whole batch comes before it. With no token to compare, `tokens` is 0 and"
    " the others are missing.",
    "buffer/*": "Staleness of the oldest group of the batch in weight versions, and counts of groups since the start.",
    "sync/*": "Of a weight update, such as `bytes`.",
    "switch/*": "Seconds and bytes of the stages of a memory switch.",
    "cpu/*": "Seconds of processor of the training process in a stage, such as `rollout`, `score`, `update`, its parts"
    " `log_probs`, `forward_backward`, `optimizer` and `diagnostics`, `sync`, `checkpoint` and `export`. A"
    " line has the costs of the checkpoint before it; the last line has those after the last step.",
    "memory/*": "Peak of the training process's resident memory in a stage, in GB; where the system cannot set a peak"
    " back, that since the start of the process.",
    "seconds/*": "Seconds of the step and its stages; `train` and `train_cpu` since the start; `overhead_share` of the"
    " step that was neither rollout nor forward or backward pass.",
    "version": "Weight version after the step.",
    "validation/*": "The same metrics of the held-out episodes, and the `seconds`, `cpu` and `memory` of the"
    " validation; `reward/low` and `reward/high` are the 95 % bootstrap interval over tasks.",
}
"""Meaning of each metric. A `*` covers all names with this start."""
