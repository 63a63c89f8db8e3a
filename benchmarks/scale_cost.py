"""
Measures the costs that the scale model needs: a message, a turn and an episode, in CPU seconds by process.

    python benchmarks/scale_cost.py [--runs 5] [--json FILE]

Real runs on Ray with one worker and one replica differ in their numbers of turns, tokens and prompt tokens, and every
process counts its CPU seconds and messages. The costs of messages (`ray_messages.py`) and of idle processes are
subtracted. The rest is a sum of a cost per episode, turn and token, found by least squares. A run with slow tools then
gives the cost of waking up an idle process: the CPU seconds that the model does not predict. `scale_limits.py --costs
FILE` reads the file; the one of this machine is `scale_model/measured_costs.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray_messages
from attrs import define, field, frozen
from measurement import describe_machine, format_spread
from ray_cost import OracleBlueprint, TimedOracle
from ray_messages import process_seconds
from scale_case import Case
from scale_model.costs import Costs, fields_of_costs
from turn_cost import CACHE, PLAN, check_result
from workload import Oracle, Workload, heavy_tail, load_tokenizer, uniform

from turnwise import Capabilities, GenerateRequest, SamplingParams, Task
from turnwise.config.runtime import RuntimeConfig
from turnwise.events.logging import configure_logging
from turnwise.protocols import Engine
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.ray import workers
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise_routers import LeastTokens

MESSAGES: Counter[str] = Counter()
"""Messages of this process: `to_replica` and `to_worker` in a replica, `collects` in the driver."""


def count_calls(owner: Any, method: str, name: str) -> None:
    """Let a function count its calls in this process."""
    original = getattr(owner, method)

    def counting(*arguments: Any, **options: Any) -> Any:
        MESSAGES[name] += 1
        return original(*arguments, **options)

    if not getattr(original, "counts", False):
        counting.counts = True  # type: ignore[attr-defined]  # a mark on a function
        setattr(owner, method, counting)


@define
class CountingOracle(TimedOracle):
    """The scripted engine, which also returns the numbers of messages of its replica."""

    def stats(self) -> dict[str, float]:
        """Return the time of the last result, and the messages so far."""
        return {**super().stats(), "cpu_s": process_seconds(), **{name: float(n) for name, n in MESSAGES.items()}}


@frozen
class CountingBlueprint(OracleBlueprint):
    """Builds replicas that count messages."""

    def make_engine(self) -> Engine:
        """Build the engine."""
        count_calls(ReplicaServer, "receive", "to_replica")
        count_calls(ReplicaServer, "_flush", "to_worker")
        oracle = Oracle.of(self.workload, load_tokenizer(self.folder))
        return CountingOracle(oracle, self.workload.seconds_per_token)


@define
class Cluster:
    """A run on Ray that stays open."""

    workload: Workload
    num_workers: int = 1
    num_replicas: int = 1
    response_length: int = 16_384
    manager: RolloutManager = field(init=False)
    tasks: list[Task] = field(init=False)
    script: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Build the manager; a `with` block starts it."""
        count_calls(workers, "unpack_episodes", "collects")
        blueprint = CountingBlueprint(self.workload, CACHE, self.response_length)
        config = RuntimeConfig(name="ray", num_workers=self.num_workers, num_replicas=self.num_replicas)
        self.manager = RolloutManager(RayRuntime(blueprint, config), PLAN)
        self.tasks = self.workload.tasks()
        self.script = Oracle.of(self.workload, load_tokenizer(CACHE)).script

    def run(self) -> dict[str, float]:
        """Run once, check every trajectory, and return seconds and messages by kind of process."""
        before = self._read()
        started = time.perf_counter()
        episodes = self.manager.rollout(self.tasks)
        wall_s = time.perf_counter() - started
        used = {name: value - before[name] for name, value in self._read().items()}
        for episode in episodes:
            check_result(episode, self.script)
        prompt_tokens = sum(each.trajectories[0].num_prompt_tokens for each in episodes)
        tokens = sum(len(each.trajectories[0]) for each in episodes)
        sampled = sum(int(each.trajectories[0].response_mask.sum()) for each in episodes)
        sizes = {"episodes": len(episodes), "turns": self.workload.num_turns, "tokens": tokens}
        return {**used, **sizes, "sampled": sampled, "prompt_tokens": prompt_tokens, "wall_s": wall_s}

    def idle(self, seconds: float = 5.0) -> dict[str, float]:
        """Return the cores that driver, worker and replica use without work: Ray's threads and the pings."""
        before = self._read()
        time.sleep(seconds)
        used = {name: value - before[name] for name, value in self._read().items()}
        return {f"{kind}_idle": used[f"{kind}_s"] / seconds for kind in ("driver", "worker", "replica")}

    def _read(self) -> dict[str, float]:
        runtime: Any = self.manager.runtime
        found = self.manager._thread.call(runtime.stats())  # type: ignore[union-attr]  # noqa: SLF001 - it is running
        total: Counter[str] = Counter({"driver_s": process_seconds(), "collects": MESSAGES["collects"]})
        for stats in found:
            is_replica = "cpu_s" in stats
            seconds = process_seconds(int(stats["pid"]))
            total["replica_s" if is_replica else "worker_s"] += seconds  # type: ignore[assignment]  # floats
            for name in ("to_replica", "to_worker"):
                total[name] += int(stats.get(name, 0.0))
        return dict(total)


WORKLOADS: tuple[dict[str, int], ...] = (
    {"num_episodes": 256, "turns": 4, "tokens": 200},
    {"num_episodes": 384, "turns": 1, "tokens": 200},
    {"num_episodes": 64, "turns": 16, "tokens": 200},
    {"num_episodes": 256, "turns": 4, "tokens": 60},
    {"num_episodes": 128, "turns": 4, "tokens": 800},
    {"num_episodes": 256, "turns": 2, "tokens": 200, "prompt_words": 1200},
)


def measure_work(runs: int) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Return the measurements of real runs, after a warm-up each, and the use of a core by idle processes."""
    import ray

    ray.init("local", namespace="turnwise", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    rows: list[dict[str, float]] = []
    idle: dict[str, list[float]] = {}
    try:
        for options in WORKLOADS:
            cluster = Cluster(uniform(**options))  # type: ignore[arg-type]  # all options are ints
            with cluster.manager:
                cluster.run()
                rows += [cluster.run() for _ in range(runs)]
                for name, value in cluster.idle().items() if len(idle.get("worker_idle", ())) < runs else ():
                    idle.setdefault(name, []).append(value)
    finally:
        ray.shutdown()
    return rows, idle


def fit(rows: Sequence[dict[str, float]], messages: dict[str, float]) -> dict[str, float]:
    """Return the costs per episode, turn and token that fit the runs best; none is negative."""
    m = messages
    worker_s, replica_s, driver_s = [], [], []
    for row in rows:
        sent, got, collects = row["to_replica"], row["to_worker"], row["collects"]
        messages_s = sent * m["request_send_s"] + got * m["result_receive_s"] + collects * m["reply_s"]
        worker_s.append(row["worker_s"] - messages_s - row["wall_s"] * m["worker_idle"])
        messages_s = sent * m["request_receive_s"] + got * m["result_send_s"]
        replica_s.append(row["replica_s"] - messages_s - row["wall_s"] * m["replica_idle"])
        driver_s.append(row["driver_s"] - collects * m["call_s"] - row["wall_s"] * m["driver_idle"])
    costs = _solve(rows, worker_s, {"episodes": "worker_episode_s", "turns": "worker_turn_s",
                                    "sampled": "worker_token_s", "prompt_tokens": "worker_prompt_token_s"})  # fmt: skip
    costs |= _solve(rows, replica_s, {"turns": "replica_request_s"})
    return costs | _solve(rows, driver_s, {"episodes": "driver_episode_s", "tokens": "driver_token_s"})


def measure_wakes(runs: int, costs: dict[str, float]) -> dict[str, list[float]]:
    """Return seconds of a job of a process that was idle, beyond those of a busy one, by kind of process."""
    import ray

    known = Costs(**{name: costs.get(name, 0.0) for name in fields_of_costs()})
    case = Case("slow tools", heavy_tail(96, seed=1, median_s=0.3, seconds_per_token=0.003, cap_s=5.0), 1, 2)
    found: dict[str, list[float]] = {f"{kind}_wake_s": [] for kind in ("driver", "worker", "replica")}
    ray.init("local", namespace="turnwise", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        cluster = Cluster(case.workload, case.workers, case.replicas)
        with cluster.manager:
            cluster.run()
            for _ in range(runs):
                real = cluster.run()
                model = case.predict(real, 0.0, known)
                seconds = {"driver": model.driver_s, "worker": model.workers_s, "replica": model.replicas_s}
                for kind, predicted in seconds.items():
                    found[f"{kind}_wake_s"].append((real[f"{kind}_s"] - predicted) / model.wakes[kind])
    finally:
        ray.shutdown()
    return found


def _solve(rows: Sequence[dict[str, float]], seconds: Sequence[float], names: dict[str, str]) -> dict[str, float]:
    """Solve by non-negative least squares, relative to each run's seconds: drop what would be negative."""
    kept = dict(names)
    weights = 1 / np.maximum(np.array(seconds), 1e-3)
    while True:
        matrix = np.array([[row[name] for name in kept] for row in rows]) * weights[:, None]
        found = dict(zip(kept, np.linalg.lstsq(matrix, np.array(seconds) * weights, rcond=None)[0], strict=True))
        lowest = min(found, key=lambda name: found[name])
        if found[lowest] >= 0 or len(kept) == 1:
            return {names[name]: max(0.0, float(found.get(name, 0.0))) for name in names}
        del kept[lowest]


def measure_views(runs: int) -> dict[str, list[float]]:
    """Return seconds per replica of a router's choice, and of the end of an episode, in a worker's pool."""
    found: dict[str, list[float]] = {"view_s": [], "release_s": []}
    ids = np.zeros(10, np.int32)
    request = GenerateRequest(request_id="r", trajectory_id="t", token_ids=ids, sampling=SamplingParams())
    for _ in range(runs):
        costs = {}
        for size in (10, 1010):
            pool = ReplicaPool(LeastTokens(), Capabilities(), size)
            for index in range(size):
                pool.replica_up(index, lambda _message: None)
            count = 300
            started = time.thread_time()
            for _ in range(count):
                loads = [pool._load(link) for link in pool._links]  # noqa: SLF001 - as `_choose` does
                pool.router.choose(request, loads)
            middle = time.thread_time()
            for _ in range(count):
                pool.release("u")
            costs[size] = (middle - started) / count, (time.thread_time() - middle) / count
        for index, name in enumerate(found):
            found[name].append((costs[1010][index] - costs[10][index]) / 1000)
    return found


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum; a difference that noise made negative counts as 0."""
    median, low, high = (max(0.0, pick(values)) for pick in (statistics.median, min, max))
    return {"median": median, "min": low, "max": high}


def main() -> None:
    """Measure, print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the costs to this file")
    arguments = parser.parse_args()
    configure_logging("warning")
    print(describe_machine(), flush=True)
    measured = {**measure_views(arguments.runs), **ray_messages.measure(arguments.runs)}
    costs = {name: summarize(values) for name, values in measured.items()}
    rows, idle = measure_work(arguments.runs)
    costs |= {name: summarize(values) for name, values in idle.items()}
    medians = {name: value["median"] for name, value in costs.items()}
    # Each pass over the workloads is a separate fit, so that the spread of the fits is seen.
    fits = [fit(rows[index :: arguments.runs], medians) for index in range(arguments.runs)]
    costs |= {name: summarize([each[name] for each in fits]) for name in fits[0]}
    medians = {name: value["median"] for name, value in costs.items()}
    costs |= {name: summarize(values) for name, values in measure_wakes(arguments.runs, medians).items()}
    print("microseconds of CPU, nanoseconds per byte, millionths of a core;", end=" ")
    print(f"medians (min-max) of {arguments.runs} runs")
    for name, value in costs.items():
        scale = 1e9 if name.endswith("byte_s") else 1e6
        print(f"{name:24s} {format_spread([value[key] * scale for key in ('min', 'median', 'max')])}")
    if arguments.json:
        document = {"machine": describe_machine(), "runs": arguments.runs, "costs": costs}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
