"""
Measures the CPU cost per turn of the Ray runtime relative to a plain asyncio loop, in one run.

    python benchmarks/ray_cost.py [--runs 5] [--episodes 256] [--nodes 4] [--latency] [--strict]

CPU seconds are summed over all processes of the run, including Ray's, without those in which the scripted engine finds
its answers. The variants alternate, so other load on the machine affects all of them, and ratios compare consecutive
runs. The last table compares claims with measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bare_loop
import wire_cost
from attrs import define, field, frozen
from claims import Claim, report
from measurement import cpu_seconds, describe_machine, format_spread
from turn_cost import CACHE, PLAN, OracleEngine, build_components, check_result
from workload import Oracle, Workload, heavy_tail, load_tokenizer, schemas, uniform

from turnwise import GenerateRequest, GenerateResult, Task
from turnwise.config.runtime import RuntimeConfig
from turnwise.episode.setup import EngineClient
from turnwise.events.logging import configure_logging
from turnwise.protocols import Engine, Router
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.worker import WorkerComponents


@define
class TimedOracle(OracleEngine):
    """The scripted engine with its CPU seconds and the time of its last result by `time.perf_counter`."""

    last_answer_at: list[float] = field(factory=lambda: [0.0])

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the workload's turn and record the time."""
        result = await super().generate(request)
        self.last_answer_at[0] = time.perf_counter()
        return result

    def stats(self) -> dict[str, float]:
        """Return the CPU seconds of all answers, and the `time.perf_counter` of the last one, which processes share."""
        return {"last_answer_at": self.last_answer_at[0], "answer_s": self.oracle.seconds[0]}


@frozen
class OracleBlueprint:
    """Builds the components of every process from the workload and the tokenizer's folder."""

    workload: Workload
    folder: Path
    response_length: int

    def make_engine(self) -> Engine:
        """Build the scripted engine."""
        oracle = Oracle.of(self.workload, load_tokenizer(self.folder))
        return TimedOracle(oracle, self.workload.seconds_per_token)

    def make_components(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerComponents:
        """Build a worker with the tool agent."""
        return build_components(self.workload, engine, load_tokenizer(self.folder), schemas(1), self.response_length)

    def make_router(self) -> Router:
        """Build the default router."""
        from turnwise_routers import LeastTokens, LeastTokensConfig

        return LeastTokens(LeastTokensConfig())


@define
class Variant:
    """A workload with a number of workers and replicas, and the results of its runs."""

    name: str
    workload: Workload
    response_length: int
    workers: int
    replicas: int
    manager: RolloutManager = field(init=False)
    results: dict[str, list[float]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Build the manager; `measure` starts it."""
        blueprint = OracleBlueprint(self.workload, CACHE, self.response_length)
        config = RuntimeConfig(name="ray", num_workers=self.workers, num_replicas=self.replicas)
        self.manager = RolloutManager(RayRuntime(blueprint, config), PLAN)

    def run(self, tasks: list[Task], script: Any) -> dict[str, float]:
        """Run once, check every trajectory and return the measurements."""
        gc.collect()
        answers_s = sum(stats.get("answer_s", 0.0) for stats in self._stats())
        cpu, wall = cpu_seconds(), time.perf_counter()
        episodes = self.manager.rollout(tasks)
        ended = time.perf_counter()
        cpu_used = cpu_seconds() - cpu
        merge_started = time.perf_counter()
        batch = self.manager.collate(episodes)
        merge_s = time.perf_counter() - merge_started
        for episode in episodes:
            check_result(episode, script)
        assert len(batch.rows) == len(tasks)
        stats = self._stats()
        last_answer_at = max(each.get("last_answer_at", 0.0) for each in stats)
        cpu_used -= sum(each.get("answer_s", 0.0) for each in stats) - answers_s
        return {
            "ray_ms": 1e3 * cpu_used / self.workload.num_turns,
            "turns_per_s": self.workload.num_turns / (ended - wall),
            "wall_s": ended - wall,
            "tail": (ended - last_answer_at) / (ended - wall + merge_s),
            "tail+merge": (ended - last_answer_at + merge_s) / (ended - wall + merge_s),
        }

    def add(self, measurements: dict[str, float]) -> None:
        """Add the measurements of a run."""
        for name, value in measurements.items():
            self.results.setdefault(name, []).append(value)

    def _stats(self) -> list[dict[str, float]]:
        runtime: Any = self.manager.runtime
        return self.manager._thread.call(runtime.stats())  # type: ignore[union-attr]  # noqa: SLF001 - it is running


def run_bare(workload: Workload, oracle: Oracle, tokenizer: Any, response_length: int) -> dict[str, float]:
    """Return the plain loop's CPU milliseconds per turn and its wall seconds."""
    gc.collect()
    oracle.seconds[0] = 0.0
    cpu, wall = time.process_time(), time.perf_counter()
    asyncio.run(bare_loop.run(workload, oracle, tokenizer, schemas(1), response_length))
    cpu_s = time.process_time() - cpu - oracle.seconds[0]
    return {"bare_ms": 1e3 * cpu_s / workload.num_turns, "bare_s": time.perf_counter() - wall}


def measure(variants: list[Variant], runs: int) -> None:
    """Run the variants alternately, `runs` times after a warm-up; each run follows a run of the plain loop."""
    tokenizer = load_tokenizer(CACHE)
    with ExitStack() as stack:
        for variant in variants:
            stack.enter_context(variant.manager)
        oracles = [Oracle.of(variant.workload, tokenizer) for variant in variants]
        for index in range(runs + 1):
            for variant, oracle in zip(variants, oracles, strict=True):
                workload = variant.workload
                measurements = run_bare(workload, oracle, tokenizer, variant.response_length)
                measurements |= variant.run(workload.tasks(), oracle.script)
                measurements["ratio"] = measurements["ray_ms"] / measurements["bare_ms"]
                if index:
                    variant.add(measurements)


def compute_ratios(numerator: Variant, denominator: Variant, name: str) -> list[float]:
    """Return the ratios of a measurement of two variants, run by run."""
    return [a / b for a, b in zip(numerator.results[name], denominator.results[name], strict=True)]


def measure_cost(episodes: int, runs: int, nodes: int) -> list[Claim]:
    """Measure the cost per turn, print the table and return the claims."""
    workload = uniform(episodes)
    sizes = [(1, 1, 4096), (2, 1, 4096), (1, 1, 16384), *([(8, 2, 4096)] if nodes > 1 else [])]
    variants = [
        Variant(f"{workers} workers, {replicas} replica, response {length}", workload, length, workers, replicas)
        for workers, replicas, length in sizes
    ]
    measure(variants, runs)
    shown = ("bare_ms", "ray_ms", "ratio", "turns_per_s", "tail", "tail+merge")
    print(f"{'':36s} " + " ".join(f"{name:>26s}" for name in shown))
    for variant in variants:
        cells = " ".join(f"{format_spread(variant.results[name]):>26s}" for name in shown)
        print(f"{variant.name:36s} {cells}", flush=True)
    one, two, long = variants[:3]
    return [
        Claim("CPU per turn of all processes over the plain loop's, 1 worker", one.results["ratio"], 3.5),
        Claim("turns per second, 1 worker and 1 replica", one.results["turns_per_s"], 700, at_most=False),
        Claim("turns per second of 2 workers over 1", compute_ratios(two, one, "turns_per_s"), 1.0, at_most=False),
        Claim("CPU per turn at response_length 16,384 over 4,096", compute_ratios(long, one, "ray_ms"), 1.05),
        Claim("time from the last engine result to the merge (share of run)", one.results["tail"], 0.05),
        Claim("time from the last engine result to the batch (share of run)", one.results["tail+merge"], 0.05),
    ]


def measure_makespans(episodes: int, runs: int, nodes: int) -> list[Claim]:
    """Measure makespan with heavy-tailed tool latencies and return the claims."""
    claims = []
    for workers, per_token_s, median_s, bound in (
        (1, 0.002, 0.2, 1.04),
        (1, 0.0005, 0.05, 1.25),
        *([(8, 0.002, 0.2, 1.04)] if nodes > 1 else []),
    ):
        workload = heavy_tail(episodes, median_s=median_s, seconds_per_token=per_token_s)
        variant = Variant("", workload, 4096, workers, 4)
        measure([variant], runs)
        critical_s = workload.critical_path_s()
        ratios, bare_ratios = ([wall / critical_s for wall in variant.results[name]] for name in ("wall_s", "bare_s"))
        text = (
            f"makespan over critical path, {workers} workers, {per_token_s * 1e3:g} ms per token, {median_s:g} s a call"
        )
        claims.append(Claim(text, ratios, bound))
        cpu = format_spread(variant.results["ray_ms"])
        print(f"{claims[-1].format()}; plain loop {format_spread(bare_ratios)}; CPU ms per turn {cpu}", flush=True)
    return claims


@contextmanager
def connected(nodes: int) -> Iterator[None]:
    """Connect to a new cluster with this number of nodes, which this machine pretends."""
    import ray
    from ray.cluster_utils import Cluster

    options = {"namespace": "turnwise", "logging_level": logging.ERROR, "log_to_driver": False}
    cluster = None
    if nodes == 1:
        ray.init("local", include_dashboard=False, **options)
    else:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        ray.init(cluster.address, **options)
    try:
        yield
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


def main() -> None:
    """Measure and print the tables and the claims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs per variant (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=256, help="episodes per run (default: %(default)s)")
    parser.add_argument(
        "--nodes", type=int, default=1, help="nodes that this machine pretends; with several, also 8 workers on them"
    )
    parser.add_argument("--latency", action="store_true", help="also measure makespan with heavy-tailed tool latencies")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a claim does not hold")
    arguments = parser.parse_args()

    configure_logging("warning")
    print(describe_machine())
    print(f"{arguments.episodes} episodes, medians (min-max) of {arguments.runs} runs; CPU in ms per turn")
    with connected(arguments.nodes):
        claims = measure_cost(arguments.episodes, arguments.runs, arguments.nodes)
        if arguments.latency:
            claims += measure_makespans(arguments.episodes, arguments.runs, arguments.nodes)
    claims += wire_cost.measure_claims(32)
    failed = report(claims)
    if arguments.strict and failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
