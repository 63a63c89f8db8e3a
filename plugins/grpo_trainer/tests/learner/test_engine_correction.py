"""Importance weights and masks between engine and trainer agree with loops over rows in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise_grpo_trainer.config import AlgorithmConfig
from turnwise_grpo_trainer.objective.policy_loss import correct_for_engine

TOKENS = st.lists(st.tuples(st.integers(0, 3), st.floats(-1.5, 1.5)), min_size=1, max_size=10)
"""Rows and log-ratios between trainer and engine."""


def reference(tokens, cap, tis_level, bounds, mis_level):
    """Return the weight of each token."""
    weights = []
    for row, log_ratio in tokens:
        own = [each for other, each in tokens if other == row]
        weight = 1.0
        if cap is not None:
            weight = min(cap, math.exp(log_ratio if tis_level == "token" else sum(own)))
        if bounds is not None:
            ratio = math.exp(log_ratio if mis_level == "token" else sum(own) / len(own))
            weight *= bounds[0] <= ratio <= bounds[1]
        weights.append(weight)
    return weights


@given(
    tokens=TOKENS,
    cap=st.sampled_from([None, 2.0]),
    tis_level=st.sampled_from(["token", "row"]),
    bounds=st.sampled_from([None, (0.5, 2.0), (0.0, 1.1)]),
    mis_level=st.sampled_from(["token", "row"]),
)
def test_weights(tokens, cap, tis_level, bounds, mis_level):
    """TIS caps the ratio of a token or of a whole row; MIS masks tokens, or rows by their geometric mean."""
    algorithm = AlgorithmConfig(tis_imp_ratio_cap=cap, tis_level=tis_level, mis_bounds=bounds, mis_level=mis_level)
    old = torch.tensor([each for _, each in tokens], dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([row for row, _ in tokens])

    weights, metrics = correct_for_engine(algorithm, old, torch.zeros_like(old), rows)

    expected = np.array(reference(tokens, cap, tis_level, bounds, mis_level))
    near_bound = [
        bounds is not None and any(abs(math.exp(log) - bound) < 1e-9 for bound in bounds)
        for _, log in [*tokens, *[(0, np.mean([e for o, e in tokens if o == row])) for row, _ in tokens]]
    ]
    if not any(near_bound):
        np.testing.assert_allclose(expected, weights.numpy(), rtol=1e-9)
    assert not weights.requires_grad
    assert (cap is not None) == ("actor/tis_mean" in metrics)
    assert (bounds is not None) == ("actor/mis_masked" in metrics)


@pytest.mark.parametrize(("level", "masked"), [("token", [0.0, 1.0, 0.0]), ("row", [1.0, 1.0, 0.0])])
def test_masked_tokens_are_counted(level, masked):
    """One token far off masks itself, or with its row the row; the metric says which tokens."""
    algorithm = AlgorithmConfig(mis_bounds=(0.5, 2.0), mis_level=level)

    _, metrics = correct_for_engine(algorithm, torch.tensor([0.0, 3.0, 0.1]), torch.zeros(3), torch.tensor([0, 0, 1]))

    assert masked == metrics["actor/mis_masked"].tolist()
