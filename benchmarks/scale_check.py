"""
Compares the scale model (`scale_limits.py`) with real runs on Ray at 1, 2 and 4 workers.

    python benchmarks/scale_check.py [--runs 5] [--costs FILE] [--json FILE]

The model gets the measured costs, the workload and the numbers of processes, and nothing of the real run. Each row is
the model's value over the real one: CPU seconds by kind of process, messages, and wall seconds. CPU seconds hardly
depend on other load on the machine. Wall seconds do, so the model has the cores of the machine, and other programs that
take as much of them as they took of the real ones.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import psutil
from measurement import describe_machine, format_spread
from scale_case import Case
from scale_cost import Cluster
from scale_model.costs import Costs, load_costs
from scale_model.result import ScaleResult
from workload import heavy_tail, uniform

from turnwise.events.logging import configure_logging

QUANTITIES = ("worker_s", "replica_s", "driver_s", "to_replica", "to_worker", "collects", "wall_s")


def build_cases(episodes: int) -> list[Case]:
    """Return every case: engines without latency, and with latency and slow tools."""
    slow = heavy_tail(episodes, median_s=0.2, seconds_per_token=0.002, cap_s=5.0)
    fast = uniform(episodes)
    return [
        Case(f"{name}, {workers} workers, {replicas} replicas", workload, workers, replicas)
        for name, workload, replicas in (("no latency", fast, 1), ("slow tools", slow, 4))
        for workers in (1, 2, 4)
    ]


def measure(case: Case, runs: int) -> dict[str, Any]:
    """Run a case after a warm-up; return the values, and the share of the machine that others had meanwhile."""
    real, foreign = [], []
    cluster = Cluster(case.workload, case.workers, case.replicas, response_length=4096)
    with cluster.manager:
        cluster.run()
        for _ in range(runs):
            before, own = psutil.cpu_times(), _own_seconds()
            real.append(cluster.run())
            after = psutil.cpu_times()
            busy = sum(after) - after.idle - after.iowait - (sum(before) - before.idle - before.iowait)
            foreign.append(max(0.0, busy - (_own_seconds() - own)) / (sum(after) - sum(before)))
    return {"case": case.name, "real": real, "foreign": foreign}


def as_values(result: ScaleResult) -> dict[str, float]:
    """Return the predicted quantities by their names."""
    seconds = {"worker_s": result.workers_s, "replica_s": result.replicas_s, "driver_s": result.driver_s}
    return {**seconds, **result.messages, "wall_s": result.seconds}


def _own_seconds() -> float:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())


def print_row(case: Case, found: dict[str, Any], costs: Costs) -> None:
    """Print the ratios of one case."""
    model = [
        as_values(case.predict(real, share, costs)) for real, share in zip(found["real"], found["foreign"], strict=True)
    ]
    print(
        f"{found['case']}; others took {format_spread([100 * each for each in found['foreign']], 0)} % of the machine"
    )
    for name in QUANTITIES:
        ratios = [m[name] / r[name] for m, r in zip(model, found["real"], strict=True)]
        values = format_spread([each[name] for each in found["real"]])
        print(f"  {name:10s} model / real {format_spread(ratios):24s} real {values}", flush=True)


def main() -> None:
    """Measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each case (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=256, help="episodes per run (default: %(default)s)")
    parser.add_argument("--costs", type=Path, help="file of scale_cost.py (default: the one of the folder)")
    parser.add_argument("--show", type=Path, help="compare with the real runs of this file, and run nothing")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    arguments = parser.parse_args()
    configure_logging("warning")
    measured = load_costs(arguments.costs)
    cases = build_cases(arguments.episodes)
    print(f"costs of {measured.machine}")
    if arguments.show:
        for case, found in zip(cases, json.loads(arguments.show.read_text(encoding="utf-8")), strict=True):
            print_row(case, found, measured.costs)
        return
    import ray

    print(f"{describe_machine()}; medians (min-max) of {arguments.runs} runs")
    ray.init("local", namespace="turnwise", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        rows = []
        for case in cases:
            rows.append(measure(case, arguments.runs))
            print_row(case, rows[-1], measured.costs)
    finally:
        ray.shutdown()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
