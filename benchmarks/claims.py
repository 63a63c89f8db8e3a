"""What is promised, next to what was measured; and on which machine."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from attrs import frozen

PACKAGES = ("turnwise", "ray", "numpy", "torch", "transformers")


def machine() -> str:
    """Return one line: processor, cores, load, and versions of what matters."""
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    return f"{_processor()}, {os.cpu_count()} cores, {load}; {', '.join(versions)}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return median, min and max."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


@frozen
class Claim:
    """
    A promise about the median of some runs.

    Attributes:
        text: what is measured, with its unit.
        values: one of each run.
        bound: the promise.
        at_most: whether the bound is an upper one.
    """

    text: str
    values: Sequence[float]
    bound: float
    at_most: bool = True

    @property
    def holds(self) -> bool:
        """Whether the median keeps the promise."""
        median = statistics.median(self.values)
        return median <= self.bound if self.at_most else median >= self.bound

    def line(self) -> str:
        """Return the claim, what was measured, and whether it holds."""
        kind = "at most" if self.at_most else "at least"
        verdict = "pass" if self.holds else "FAIL"
        return f"{verdict}  {self.text:66s} {spread(self.values):26s} {kind} {self.bound:g}"


def report(claims: Sequence[Claim]) -> int:
    """Print every claim; return how many do not hold."""
    print("promises, with median (min-max):")
    for claim in claims:
        print(claim.line())
    return sum(not claim.holds for claim in claims)
