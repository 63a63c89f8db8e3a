"""
What a turn costs under Ray: workers and replicas as actors, next to a bare asyncio loop, in one run.

    python benchmarks/ray_cost.py [--runs 5] [--episodes 256]

CPU seconds are summed over all processes that the run started, Ray's own included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import bare_loop
import psutil
from attrs import frozen
from turn_cost import CACHE, OracleEngine, parts_for, refuse_wrong
from workload import Oracle, Workload, heavy_tail, schemas, tokenizer_of, uniform

from turnwise import Task
from turnwise.config_runtime import RuntimeConfig
from turnwise.episode_setup import EngineClient
from turnwise.protocols import Engine, Router
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime
from turnwise.runtime.worker import WorkerParts


@frozen
class OracleBlueprint:
    """What every process builds its parts from: the workload, and where the tokenizer lies."""

    workload: Workload
    folder: Path
    response_length: int

    def make_engine(self) -> Engine:
        """Build the engine that knows the script."""
        oracle = Oracle.of(self.workload, tokenizer_of(self.folder))
        return OracleEngine(oracle, self.workload.seconds_per_token)

    def make_parts(self, engine: EngineClient) -> WorkerParts:
        """Build a worker with the tool agent."""
        return parts_for(self.workload, engine, tokenizer_of(self.folder), schemas(1), self.response_length)

    def make_router(self) -> Router:
        """Build the default router."""
        from turnwise.routing import LeastTokens, LeastTokensConfig

        return LeastTokens(LeastTokensConfig())


def cpu_s() -> float:
    """Return CPU seconds of this process and all below it, so far."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure(workload: Workload, response_length: int, workers: int, replicas: int, runs: int) -> dict[str, Any]:
    """Return figures of each run: CPU milliseconds a turn, turns a second, makespan, and the bare loop's."""
    tokenizer = tokenizer_of(CACHE)
    oracle = Oracle.of(workload, tokenizer)
    tasks = [
        Task(messages=tuple(workload.messages(number)), uid=str(number), sample_index=number)
        for number in range(len(workload.episodes))
    ]
    blueprint = OracleBlueprint(workload, CACHE, response_length)
    runtime = RayRuntime(blueprint, RuntimeConfig(name="ray", num_workers=workers, num_replicas=replicas))
    plan = RolloutPlan(default_agent="tool_agent", agent_names=frozenset({"tool_agent"}))
    figures: dict[str, list[float]] = {"bare_ms": [], "ray_ms": [], "turns_per_s": [], "wall_s": []}
    with RolloutManager(runtime, plan) as manager:
        for index in range(runs + 1):
            cpu = time.process_time()
            asyncio.run(bare_loop.run(workload, oracle, tokenizer, schemas(1), response_length))
            bare_ms = 1e3 * (time.process_time() - cpu) / workload.num_turns
            cpu, wall = cpu_s(), time.perf_counter()
            results = manager.rollout(tasks)
            wall_s, cpu_used = time.perf_counter() - wall, cpu_s() - cpu
            for result in results:
                refuse_wrong(result, oracle.script)
            if index:
                figures["bare_ms"].append(bare_ms)
                figures["ray_ms"].append(1e3 * cpu_used / workload.num_turns)
                figures["turns_per_s"].append(workload.num_turns / wall_s)
                figures["wall_s"].append(wall_s)
    figures["ratio"] = [a / b for a, b in zip(figures["ray_ms"], figures["bare_ms"], strict=True)]
    return figures


def line(name: str, figures: dict[str, Any], *keys: str) -> str:
    """Return one row: median, min and max of each figure."""
    cells = []
    for key in keys:
        values = figures[key]
        cells.append(f"{key} {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})")
    return f"{name:42s} " + "  ".join(cells)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--latency", action="store_true", help="also makespans under heavy-tailed tool latency")
    arguments = parser.parse_args()
    import ray

    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ray {ray.__version__}")
    shown = ("bare_ms", "ray_ms", "ratio", "turns_per_s")
    for workers, length in ((1, 4096), (2, 4096), (1, 16384)):
        figures = measure(uniform(arguments.episodes), length, workers, 1, arguments.runs)
        print(line(f"{workers} workers, 1 replica, response {length}", figures, *shown), flush=True)
    if arguments.latency:
        for per_token, median_s in ((0.002, 0.2), (0.0005, 0.05)):
            workload = heavy_tail(arguments.episodes, median_s=median_s, seconds_per_token=per_token)
            figures = measure(workload, 4096, 1, 4, arguments.runs)
            figures["makespan"] = [wall / workload.critical_path_s() for wall in figures["wall_s"]]
            print(line(f"heavy tail, {per_token * 1e3:g} ms a token", figures, "makespan"), flush=True)


if __name__ == "__main__":
    main()
