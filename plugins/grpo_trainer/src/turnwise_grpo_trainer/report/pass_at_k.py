"""pass@k, and means over tasks with bootstrap confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

_RARE: Final = 5
"""From so many zeros and ones on, resampling describes both."""


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

    If all values are 0 or 1 and fewer than five are of one kind, resampling says too little about the rare kind, and
    nothing when there is none: its 95 % interval covers a share of 0.99 in 60 % of cases with 96 tasks. The interval is
    then Wilson's (1927), doi:10.1080/01621459.1927.10502953. Other values that are nearly equal have no remedy.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("no values to estimate from")
    array: NDArray[np.float64] = np.asarray(values, np.float64)
    if len(array) == 1:
        return Estimate(value=float(array[0]), low=None, high=None)
    if (interval := _rare_interval(array, confidence)) is not None:
        return Estimate(value=float(array.mean()), low=interval[0], high=interval[1])
    drawn = np.random.default_rng(seed).integers(0, len(array), (resamples, len(array)))
    means = array[drawn].mean(1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(value=float(array.mean()), low=float(low), high=float(high))


def _rare_interval(values: NDArray[np.float64], confidence: float) -> tuple[float, float] | None:
    """Return Wilson's interval of the share of ones; None unless all values are 0 or 1 and one kind is rare."""
    num, ones = len(values), int((values == 1).sum())
    if ones + int((values == 0).sum()) < num or min(ones, num - ones) >= _RARE:
        return None
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, scale = ones / num, 1 + z**2 / num
    middle = (share + z**2 / (2 * num)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    # An end is exact where all values are equal, and rounding must not move it past the mean.
    return min(max(0.0, middle - half), share), max(min(1.0, middle + half), share)
