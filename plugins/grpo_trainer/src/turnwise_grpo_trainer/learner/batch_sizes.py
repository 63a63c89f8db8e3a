"""How many tokens a forward pass takes at once, and of how many the logits are in memory at once."""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from turnwise_grpo_trainer.config import PolicyConfig
from turnwise_grpo_trainer.learner.micro_batches import MicroBatch
from turnwise_grpo_trainer.learner.models import run_model

_MOST_TOKENS: Final = 8192
_KEPT_BYTES: Final = 1 << 28
"""Of a forward pass on a CPU, where products of some hundred rows are as fast as larger ones."""
_LOGITS_MIB: Final = {"cpu": 32}
_LOGITS_MIB_ELSEWHERE: Final = 512
_PROBED_TOKENS: Final = 16


@frozen
class BatchSizes:
    """
    Sizes that limit the memory of an update. They depend on config, model and device only, so a resume repeats them.

    Attributes:
        micro_batch_tokens: most tokens of a forward pass, including pads.
        logits_chunk: most tokens whose logits are in memory at once; None for all.
    """

    micro_batch_tokens: int
    logits_chunk: int | None

    @classmethod
    def choose(cls, config: PolicyConfig, model: Any, device: torch.device) -> BatchSizes:
        """
        Return the sizes that the config sets, and for the others sizes for the model and the device.

        Args:
            config: of the policy.
            model: the policy, on the host and not sharded.
            device: on which it will be trained.
        """
        tokens, mib = config.max_tokens_per_micro_batch, config.logits_mib
        if tokens is None:
            limit = _KEPT_BYTES / kept_bytes_per_token(model) if device.type == "cpu" else _MOST_TOKENS
            tokens = max(1, min(_MOST_TOKENS, int(limit)))
        if mib is None:
            mib = _LOGITS_MIB.get(device.type, _LOGITS_MIB_ELSEWHERE)
        row_bytes = 4 * int(model.config.get_text_config().vocab_size)
        return cls(tokens, max(1, int(mib * (1 << 20)) // row_bytes) if mib else None)


def kept_bytes_per_token(model: Any) -> float:
    """Return how many bytes a forward pass keeps for the backward pass, for each token, without weights and logits."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    column = torch.zeros(1, _PROBED_TOKENS, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    positions = torch.arange(_PROBED_TOKENS)[None]
    micro = MicroBatch(column, positions, column, column, column, one, column[:, :1], one, one, False, False)
    # Adapters with dropout draw random numbers, which must not change those of the training.
    with torch.random.fork_rng(devices=()), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run_model(model, micro, logits_to_keep=micro.keep)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    size = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    del output
    return max(1.0, size / _PROBED_TOKENS)
