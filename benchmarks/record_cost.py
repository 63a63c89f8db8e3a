"""
What the token record costs: appending, deriving and checking, by record length and number of segments.

    python benchmarks/record_cost.py [--runs 7]

An append must cost the same at the end of a long record as at its beginning, so the time for a whole record grows with
its tokens and segments, not with their square.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from turnwise import Trajectory
from turnwise.invariants import check_trajectory

SHAPES = ((1_000, 10), (10_000, 100), (100_000, 1_000), (100_000, 10))


def build(num_tokens: int, num_segments: int) -> Trajectory:
    """Return a record of actions and observations in turn."""
    size = num_tokens // num_segments
    ids, logprobs = np.arange(size, dtype=np.int32), np.full(size, -0.5, np.float32)
    trajectory = Trajectory(ids[:100])
    for index in range(num_segments):
        if index % 2:
            trajectory.add_observation(ids)
        else:
            trajectory.add_action(ids, logprobs, 1)
    return trajectory


def append_late(trajectory: Trajectory) -> Callable[[], object]:
    """Return an append of one token at the end of a record."""
    return lambda: trajectory.add_action([1], [-0.5], 1)


def timed(run: Callable[[], object], runs: int) -> str:
    """Return median, min and max microseconds of some calls."""
    run()
    values = []
    for _ in range(runs):
        started = time.perf_counter()
        run()
        values.append(1e6 * (time.perf_counter() - started))
    return f"{statistics.median(values):10.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"microseconds, median (min-max) of {runs} runs")
    print(f"{'tokens':>8s} {'segments':>8s}  {'build':>30s} {'one more append':>30s} {'check':>30s} {'mask':>30s}")
    for num_tokens, num_segments in SHAPES:
        record = build(num_tokens, num_segments)
        cells = (
            timed(lambda shape=(num_tokens, num_segments): build(*shape), runs),
            timed(append_late(build(num_tokens, num_segments)), runs),
            timed(lambda record=record: check_trajectory(record), runs),
            timed(lambda record=record: record.response_mask, runs),
        )
        print(f"{num_tokens:8d} {num_segments:8d}  " + " ".join(f"{cell:>30s}" for cell in cells))


if __name__ == "__main__":
    main()
