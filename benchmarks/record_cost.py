"""
Measures the token record: appends, derived columns and checks, by record length and number of segments.

    python benchmarks/record_cost.py [--runs 7]

An append must cost the same at any record length, so the time to build a record grows linearly with its tokens and
segments.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from measurement import describe_machine, format_spread

from turnwise import Trajectory
from turnwise.record.invariants import check_trajectory

SHAPES = ((1_000, 10), (10_000, 100), (100_000, 1_000), (100_000, 10))


def build(num_tokens: int, num_segments: int) -> Trajectory:
    """Return a record of alternating actions and observations."""
    size = num_tokens // num_segments
    ids, logprobs = np.arange(size, dtype=np.int32), np.full(size, -0.5, np.float32)
    trajectory = Trajectory(ids[:100])
    for index in range(num_segments):
        if index % 2:
            trajectory.add_observation(ids)
        else:
            trajectory.add_action(ids, logprobs, 1)
    return trajectory


def make_append(trajectory: Trajectory) -> Callable[[], object]:
    """Return a function that appends one token to a record."""
    return lambda: trajectory.add_action([1], [-0.5], 1)


def measure(run: Callable[[], object], runs: int) -> str:
    """Return the spread of a call's microseconds over several runs."""
    run()
    values = []
    for _ in range(runs):
        started = time.perf_counter()
        run()
        values.append(1e6 * (time.perf_counter() - started))
    return format_spread(values, 1)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="measured runs (default: %(default)s)")
    runs = parser.parse_args().runs
    print(describe_machine())
    print(f"microseconds, median (min-max) of {runs} runs")
    print(f"{'tokens':>8s} {'segments':>8s}  {'build':>30s} {'one more append':>30s} {'check':>30s} {'mask':>30s}")
    for num_tokens, num_segments in SHAPES:
        record = build(num_tokens, num_segments)
        cells = (
            measure(lambda shape=(num_tokens, num_segments): build(*shape), runs),
            measure(make_append(build(num_tokens, num_segments)), runs),
            measure(lambda record=record: check_trajectory(record), runs),
            measure(lambda record=record: record.response_mask, runs),
        )
        print(f"{num_tokens:8d} {num_segments:8d}  " + " ".join(f"{cell:>30s}" for cell in cells))


if __name__ == "__main__":
    main()
