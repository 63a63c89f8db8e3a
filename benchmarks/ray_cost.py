"""
What a turn costs under Ray: workers and replicas as actors, next to a bare asyncio loop, in one run.

    python benchmarks/ray_cost.py [--runs 5] [--episodes 256] [--latency] [--strict]

CPU seconds are summed over all processes that the run started, Ray's own included. The ways to run take turns, so that
other work on the machine falls on all of them; ratios are those of neighbours in time. At the end stands what is
promised, next to what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bare_loop
import psutil
import wire_cost
from attrs import define, field, frozen
from claims import Claim, machine, report, spread
from turn_cost import CACHE, OracleEngine, parts_for, refuse_wrong
from workload import Oracle, Workload, heavy_tail, schemas, tokenizer_of, uniform

from turnwise import GenerateRequest, GenerateResult, Task
from turnwise.config_runtime import RuntimeConfig
from turnwise.episode_setup import EngineClient
from turnwise.protocols import Engine, Router
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime
from turnwise.runtime.worker import WorkerParts
from turnwise.telemetry import configure_logging


@define
class TimedOracle(OracleEngine):
    """The engine that knows the script, and when it answered last: processes of one machine share that clock."""

    last_answer_at: list[float] = field(factory=lambda: [0.0])

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer as the script has it."""
        result = await super().generate(request)
        self.last_answer_at[0] = time.perf_counter()
        return result

    def stats(self) -> dict[str, float]:
        """Return when the last answer was given, by `time.perf_counter`."""
        return {"last_answer_at": self.last_answer_at[0]}


@frozen
class OracleBlueprint:
    """What every process builds its parts from: the workload, and where the tokenizer lies."""

    workload: Workload
    folder: Path
    response_length: int

    def make_engine(self) -> Engine:
        """Build the engine that knows the script."""
        oracle = Oracle.of(self.workload, tokenizer_of(self.folder))
        return TimedOracle(oracle, self.workload.seconds_per_token)

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


@define
class Way:
    """One way to run a workload, and what each of its runs gave."""

    name: str
    workload: Workload
    response_length: int
    workers: int
    replicas: int
    manager: RolloutManager = field(init=False)
    figures: dict[str, list[float]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Build the manager; it is started by whoever measures."""
        blueprint = OracleBlueprint(self.workload, CACHE, self.response_length)
        config = RuntimeConfig(name="ray", num_workers=self.workers, num_replicas=self.replicas)
        plan = RolloutPlan(default_agent="tool_agent", agent_names=frozenset({"tool_agent"}))
        self.manager = RolloutManager(RayRuntime(blueprint, config), plan)

    def run(self, tasks: list[Task], script: Any) -> dict[str, float]:
        """Run once, check every trajectory, and return the figures."""
        gc.collect()
        cpu, wall = cpu_s(), time.perf_counter()
        results = self.manager.rollout(tasks)
        ended = time.perf_counter()
        cpu_used = cpu_s() - cpu
        merging = time.perf_counter()
        batch = self.manager.collate(results)
        merge_s = time.perf_counter() - merging
        for result in results:
            refuse_wrong(result, script)
        assert len(batch.rows) == len(tasks)
        answered = max(stats.get("last_answer_at", 0.0) for stats in self._stats())
        return {
            "ray_ms": 1e3 * cpu_used / self.workload.num_turns,
            "turns_per_s": self.workload.num_turns / (ended - wall),
            "wall_s": ended - wall,
            "tail": (ended - answered) / (ended - wall + merge_s),
            "tail+merge": (ended - answered + merge_s) / (ended - wall + merge_s),
        }

    def keep(self, figures: dict[str, float]) -> None:
        """Keep the figures of a run."""
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)

    def _stats(self) -> list[dict[str, float]]:
        runtime: Any = self.manager.runtime
        return self.manager._thread.call(runtime.stats())  # type: ignore[union-attr]  # noqa: SLF001 - it is running


def tasks_of(workload: Workload) -> list[Task]:
    """Return a task per episode."""
    return [
        Task(messages=tuple(workload.messages(number)), uid=str(number), sample_index=number)
        for number in range(len(workload.episodes))
    ]


def bare(workload: Workload, oracle: Oracle, tokenizer: Any, response_length: int) -> dict[str, float]:
    """Return CPU milliseconds a turn of the bare loop, and its seconds."""
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    asyncio.run(bare_loop.run(workload, oracle, tokenizer, schemas(1), response_length))
    cpu_s = time.process_time() - cpu
    return {"bare_ms": 1e3 * cpu_s / workload.num_turns, "bare_s": time.perf_counter() - wall}


def measure(ways: list[Way], runs: int) -> None:
    """Run each way `runs` times after a warm-up, in turn, each with a bare loop before it."""
    tokenizer = tokenizer_of(CACHE)
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(way.manager)
        oracles = [Oracle.of(way.workload, tokenizer) for way in ways]
        tasks = [tasks_of(way.workload) for way in ways]
        for index in range(runs + 1):
            for way, oracle, some in zip(ways, oracles, tasks, strict=True):
                figures = bare(way.workload, oracle, tokenizer, way.response_length) | way.run(some, oracle.script)
                figures["ratio"] = figures["ray_ms"] / figures["bare_ms"]
                if index:
                    way.keep(figures)


def over(one: Way, other: Way, name: str) -> list[float]:
    """Return a figure of one way over the same of another, run by run."""
    return [a / b for a, b in zip(one.figures[name], other.figures[name], strict=True)]


def cost(episodes: int, runs: int) -> list[Claim]:
    """Measure what a turn costs, print the table, and return what is promised of it."""
    workload = uniform(episodes)
    ways = [
        Way(f"{workers} workers, 1 replica, response {length}", workload, length, workers, 1)
        for workers, length in ((1, 4096), (2, 4096), (1, 16384))
    ]
    measure(ways, runs)
    shown = ("bare_ms", "ray_ms", "ratio", "turns_per_s", "tail", "tail+merge")
    print(f"{'':36s} " + " ".join(f"{name:>26s}" for name in shown))
    for way in ways:
        print(f"{way.name:36s} " + " ".join(f"{spread(way.figures[name]):>26s}" for name in shown), flush=True)
    one, two, long = ways
    return [
        Claim("CPU a turn of all processes over the bare loop's, 1 worker", one.figures["ratio"], 3.5),
        Claim("turns a second, 1 worker and 1 replica", one.figures["turns_per_s"], 700, at_most=False),
        Claim("turns a second of 2 workers over 1", over(two, one, "turns_per_s"), 1.0, at_most=False),
        Claim("CPU a turn at response_length 16,384 over 4,096", over(long, one, "ray_ms"), 1.05),
        Claim("time from the last engine answer to the merge (share of run)", one.figures["tail"], 0.05),
        Claim("time from the last engine answer to the batch (share of run)", one.figures["tail+merge"], 0.05),
    ]


def makespans(episodes: int, runs: int) -> list[Claim]:
    """Measure runs with heavy-tailed tool latency, and return what is promised of them."""
    claims = []
    for per_token_s, median_s, bound in ((0.002, 0.2, 1.04), (0.0005, 0.05, 1.25)):
        workload = heavy_tail(episodes, median_s=median_s, seconds_per_token=per_token_s)
        way = Way("", workload, 4096, 1, 4)
        measure([way], runs)
        critical_s = workload.critical_path_s()
        ratios, bare_ratios = ([wall / critical_s for wall in way.figures[name]] for name in ("wall_s", "bare_s"))
        text = f"makespan over critical path, {per_token_s * 1e3:g} ms a token, {median_s:g} s a tool call"
        claims.append(Claim(text, ratios, bound))
        print(f"{claims[-1].line()}; the bare loop's {spread(bare_ratios)}", flush=True)
    return claims


def main() -> None:
    """Measure, and print the tables and the promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each way, after a warm-up")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--latency", action="store_true", help="also makespans under heavy-tailed tool latency")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a promise does not hold")
    arguments = parser.parse_args()
    import ray

    configure_logging("warning")
    print(machine())
    print(f"{arguments.episodes} episodes, medians (min-max) of {arguments.runs} runs; CPU in ms a turn")
    ray.init("local", namespace="turnwise", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        claims = cost(arguments.episodes, arguments.runs)
        if arguments.latency:
            claims += makespans(arguments.episodes, arguments.runs)
    finally:
        ray.shutdown()
    claims += wire_cost.claims(32)
    failed = report(claims)
    if arguments.strict and failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
