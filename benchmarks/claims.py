"""Performance claims, checked against measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from attrs import frozen
from measurement import format_spread


@frozen
class Claim:
    """
    A bound on the median of several runs.

    Attributes:
        text: the measured quantity with its unit.
        values: one value per run.
        bound: limit of the median.
        at_most: whether `bound` is an upper limit rather than a lower one.
    """

    text: str
    values: Sequence[float]
    bound: float
    at_most: bool = True

    @property
    def holds(self) -> bool:
        """Return whether the median is within the bound."""
        median = statistics.median(self.values)
        return median <= self.bound if self.at_most else median >= self.bound

    def format(self) -> str:
        """Return one line with the verdict, the claim, the spread and the bound."""
        kind = "at most" if self.at_most else "at least"
        verdict = "pass" if self.holds else "FAIL"
        return f"{verdict}  {self.text:66s} {format_spread(self.values):26s} {kind} {self.bound:g}"


def report(claims: Sequence[Claim]) -> int:
    """Print every claim; return the number that do not hold."""
    print("claims, with median (min-max):")
    for claim in claims:
        print(claim.format())
    return sum(not claim.holds for claim in claims)
