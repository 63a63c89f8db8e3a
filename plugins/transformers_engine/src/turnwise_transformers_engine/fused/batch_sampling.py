"""
Samples the next token of all rows in one call.

A row's random numbers follow from its seed and the number of its tokens, so they do not depend on the other rows.
"""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from turnwise.types import SamplingParams
from turnwise_engine_support.requests import is_greedy, sampled_temperature

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)

COLUMNS: Final[dict[str, Any]] = {
    "temperature": np.float32,
    "greedy": np.bool_,
    "top_k": np.int64,
    "top_p": np.float32,
    "seed": np.uint64,
}
"""The columns of `SamplingColumns` that stay the same over a request."""


def sampling_values(params: SamplingParams, seed: int, vocab_size: int) -> dict[str, Any]:
    """Return the values of a request for `COLUMNS`."""
    greedy = is_greedy(params)
    return {
        "temperature": sampled_temperature(params),
        "greedy": greedy,
        "top_k": vocab_size if greedy or params.top_k == -1 else min(params.top_k, vocab_size),
        "top_p": 1.0 if greedy else params.top_p,
        "seed": seed % 2**64,
    }


@frozen(eq=False)
class SamplingColumns:
    """
    Parameters of B rows, (B,) each.

    Attributes:
        temperature: 1 for greedy rows.
        greedy: whether the best id is taken.
        top_k: number of ids to keep.
        top_p: mass of the nucleus.
        seed: of the row's random numbers.
        count: tokens that the row has sampled.
    """

    temperature: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    count: NDArray[np.int64]


def make_columns(values: Sequence[Mapping[str, object]], counts: Sequence[int]) -> SamplingColumns:
    """Return the columns of rows with these values of `sampling_values`, and these numbers of sampled tokens."""
    columns = {name: np.array([row[name] for row in values], kind) for name, kind in COLUMNS.items()}
    return SamplingColumns(**columns, count=np.array(counts, np.int64))


def uniform_numbers(seed: NDArray[np.uint64], count: NDArray[np.int64]) -> NDArray[np.float64]:
    """
    Return (B,) numbers in [0, 1): for each row the number at a place of the row's random stream.

    The streams are SplitMix64 (Steele, Lea and Flood 2014), which can be read at any place. The seed is mixed first,
    so that seeds in sequence have unrelated streams.
    """
    mixed = _mix(_mix(seed + _GAMMA) + (count.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    # 52 bits: the product with a total is then always below the total.
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIX:
        state = (state ^ (state >> shift)) * factor
    return state ^ (state >> np.uint64(31))


@torch.inference_mode()
def sample_rows(logits: Tensor, columns: SamplingColumns) -> tuple[list[int], list[float]]:
    """
    Sample a token for each row: temperature, then top-k, then top-p.

    Args:
        logits: (B, V) float32.
        columns: of the rows.

    Returns:
        Ids, and the log-probability of each under its sampling distribution, which is 0 for greedy rows.
    """
    device, scores = logits.device, logits
    if (columns.temperature != 1).any():
        scores = scores / torch.from_numpy(columns.temperature).to(device)[:, None]
    rows = np.flatnonzero((columns.top_k < logits.shape[1]) | (columns.top_p < 1))
    if len(rows):
        places = torch.from_numpy(rows).to(device)
        top_k, top_p = (torch.from_numpy(each[rows]).to(device)[:, None] for each in (columns.top_k, columns.top_p))
        scores = scores.index_copy(0, places, _filtered(scores[places], top_k, top_p))
    logprobs = scores.log_softmax(-1)
    # In float64: the sum over a large vocabulary in float32 would shift the bounds of rare ids by more than their mass.
    bounds = logprobs.exp().cumsum(-1, dtype=torch.float64)
    drawn = torch.from_numpy(uniform_numbers(columns.seed, columns.count)).to(device)[:, None]
    # The first id whose bound is above the number; an id of mass zero has the bound of the id before it.
    chosen = torch.searchsorted(bounds, bounds[:, -1:] * drawn, right=True)
    values = logprobs.gather(-1, chosen)
    if columns.greedy.any():
        greedy = torch.from_numpy(columns.greedy).to(device)[:, None]
        chosen = torch.where(greedy, scores.argmax(-1, keepdim=True), chosen)
        values = values.masked_fill(greedy, 0.0)
    return chosen[:, 0].tolist(), values[:, 0].tolist()


def _filtered(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return (R, V) scores, with -inf for ids outside top-k and top-p, (R, 1) each."""
    ordered, order = scores.sort(descending=True, stable=True)
    # Ids that tie with the last of the top k are kept.
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, top_k - 1), -torch.inf)
    probabilities = ordered.softmax(-1)
    outside = (probabilities.cumsum(-1) - probabilities >= top_p) & (top_p < 1)
    outside[:, 0] = False  # a nucleus below the least number of float32 is 0, and still has the best id
    return scores.scatter(-1, order, ordered.masked_fill(outside, -torch.inf))
