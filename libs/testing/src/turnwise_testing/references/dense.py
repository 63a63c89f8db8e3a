"""
The slow truth about layouts: whole matrices of visibility, and a forward pass under one.

The reference for engines and for fast attention. It takes L x L memory for L tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from turnwise.layout import visible_keys
from turnwise.record.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor


def visibility(trajectory: Trajectory) -> NDArray[np.bool_]:
    """Return (T, T) bool: whether the token of a row sees the token of a column."""
    return visible_keys(trajectory.block_start, trajectory.path_start, np.arange(len(trajectory)))


def predecessors(trajectory: Trajectory) -> NDArray[np.int64]:
    """
    Return (T,) the index of the token whose logits a token was drawn from; -1 for the first of all.

    It is the token before, but the first token of a path follows the last token before its block.
    """
    before = np.arange(len(trajectory), dtype=np.int64) - 1
    for block, start, _stop in trajectory.layout.paths:
        before[start] = block - 1
    return before


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """
    Attend by the definition, with a whole matrix of weights.

    Args:
        query: (B, H, L, D).
        key: (B, G, L, D), where G divides H.
        value: (B, G, L, D).
        visible: (B, L, L) bool, or broadcastable to it; every row has a True.
        scaling: of the products.

    Returns:
        (B, H, L, D).
    """
    import torch

    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = (query @ key.transpose(-1, -2)) * scaling
    weights: Tensor = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return weights @ value


def token_logprobs(model: Any, trajectory: Trajectory, temperature: float = 1.0) -> NDArray[np.float64]:
    """
    Return (T,) float64: log-probability of each token under the record's layout; nan for the first.

    The mask is explicit and additive. Without a mask transformers takes jumps in positions for packed sequences, and
    under eager attention a boolean one is added as numbers.

    Args:
        model: a causal language model of transformers.
        trajectory: the record.
        temperature: that the tokens were drawn with.
    """
    import torch

    visible = torch.from_numpy(visibility(trajectory)).to(model.device)[None, None]
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=model.device)
    ids, positions = (
        torch.from_numpy(column.astype(np.int64)).to(model.device)
        for column in (trajectory.input_ids, trajectory.position_ids)
    )
    with torch.no_grad():
        logits = model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=mask.masked_fill_(~visible, torch.finfo(model.dtype).min),
            use_cache=False,
        ).logits[0]
    before = torch.from_numpy(predecessors(trajectory)).to(model.device)
    logprobs = (logits[before].double() / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    result: NDArray[np.float64] = logprobs.cpu().numpy()
    result[np.asarray(before.cpu()) < 0] = np.nan
    return result
