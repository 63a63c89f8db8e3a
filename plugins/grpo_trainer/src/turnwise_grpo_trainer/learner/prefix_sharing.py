"""
Whether a model can compute rows that share prefixes as one forest, and the costs by which a plan decides.

A model whose tokens read others than through masked attention cannot: recurrent states, convolutions, its own masks.
So the loaded model computes a small forest, and must give the result of separate rows.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from typing import Any, Final

import structlog
import torch
from torch import Tensor

from turnwise_grpo_trainer.config import TrainConfig
from turnwise_grpo_trainer.learner.lora import without_dropout
from turnwise_grpo_trainer.learner.micro_batches import MicroBatch, collate
from turnwise_grpo_trainer.learner.models import SEGMENTS, SEGMENTS_OR_SDPA, run_model
from turnwise_grpo_trainer.learner.passes import Sharing
from turnwise_grpo_trainer.learner.prefix_forests import collate_forest
from turnwise_grpo_trainer.objective.rows import TokenRows

_DENSE: Final = ("sdpa", "eager")
_KNOWN_LAYERS: Final = {"full_attention", "sliding_attention"}
_SHARED, _OWN = 5, 4
_TOLERANCES: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_LOW_PRECISION: Final = 3e-2


def find_sharing(config: TrainConfig, model: Any) -> Sharing | None:
    """
    Return the costs of forests for a model; None if prefixes are not to be shared, or with one log line if they cannot.

    Args:
        config: the `train` section.
        model: the policy, on the host and not sharded.
    """
    if not config.policy.share_prefixes:
        return None
    obstacle = find_obstacle(config, model)
    if obstacle is not None:
        structlog.get_logger().info(f"shared prefixes are forwarded once for each row: {obstacle}")
        return None
    text = model.config.get_text_config()
    return Sharing(pair_cost(model, text), _attention_of(model) in _DENSE, _find_window(text))


def find_obstacle(config: TrainConfig, model: Any) -> str | None:
    """Return why a model cannot compute forests; None if it can."""
    if config.lora is not None and config.lora.dropout > 0:
        return "train.lora.dropout draws its own numbers for each row"
    if hasattr(model.config, "vision_config"):
        return "the model reads pictures"
    kind, text = _attention_of(model), model.config.get_text_config()
    if kind not in (*_DENSE, SEGMENTS, SEGMENTS_OR_SDPA):
        return f"train.policy.attn_implementation={kind} takes no mask of a forest"
    unknown = sorted({*(getattr(text, "layer_types", None) or ())} - _KNOWN_LAYERS)
    if unknown:
        return f"the model has layers of the kind {', '.join(unknown)}"
    if kind == SEGMENTS and _find_window(text) is not None:
        return f"the model has sliding windows, which {SEGMENTS} does not support"
    try:
        return _compare_small_forest(model)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"the model refuses a forest ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"


def _attention_of(model: Any) -> str:
    return str(model.config._attn_implementation)  # noqa: SLF001 - transformers has no public name for it


def _find_window(text: object) -> int | None:
    """Return the tokens that a sliding window sees; None if all layers see the whole row."""
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    return None if kinds and "sliding_attention" not in kinds else window


def _compare_small_forest(model: Any) -> str | None:
    """Compute three rows that share a prefix in both ways."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    length = _SHARED + _OWN
    prefix = torch.arange(_SHARED)
    ids = torch.cat([torch.cat([prefix, _SHARED + _OWN * row + torch.arange(_OWN)]) for row in range(3)]) % vocabulary
    positions = torch.arange(length).repeat(3)
    zeros = torch.zeros(3 * length, dtype=torch.int64)
    columns = {"input_ids": ids, "position_ids": positions, "block_start": zeros, "path_start": zeros}
    rows = TokenRows({**columns, "loss_mask": (positions > 0).long()}, (0, length, 2 * length, 3 * length))
    with torch.no_grad(), torch.random.fork_rng(devices=()), without_dropout(model):
        forest = collate_forest(rows, range(3))
        separate = collate(rows, range(3), packed=False)
        found, expected = (_logits_by_token(model, micro) for micro in (forest, separate))
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    limit = _TOLERANCES.get(model.dtype, _LOW_PRECISION)
    return None if error <= limit else f"a small forest differs from separate rows by {error:.1e} of the largest logit"


def _logits_by_token(model: object, micro: MicroBatch) -> Tensor:
    """Return (M, V) logits in the order of the tokens that they predict."""
    logits = run_model(model, micro, logits_to_keep=micro.keep).logits
    ordered: Tensor = logits[micro.predictors[0], micro.predictors[1]][torch.argsort(micro.tokens)].double()
    return ordered


def count_expert_share(config: object) -> float:
    """Return the share of a model's experts that compute a token; 1 of a model without experts."""
    every = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    used = getattr(config, "num_experts_per_tok", None)
    return float(used) / float(every) if every and used else 1.0


def pair_cost(model: torch.nn.Module, config: object) -> float:
    """Return the cost of a query and a key in all layers, in units of a token's products with weights."""
    heads = int(getattr(config, "num_attention_heads", 1))
    size = int(getattr(config, "head_dim", None) or int(getattr(config, "hidden_size", 1)) // heads)
    layers = int(getattr(config, "num_hidden_layers", 1))
    weights = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            weights += parameter.numel() * (count_expert_share(config) if "expert" in name else 1.0)
    # Two products with a head's vectors, and an exponential, which costs about as much as products of eight numbers.
    return 2 * layers * heads * (size + 8) / max(weights, 1.0)
