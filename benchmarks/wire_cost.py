"""
What travels between a worker and a replica, and from the worker to the driver, by the number of turns.

    python benchmarks/wire_cost.py [--episodes 32]

Every message is pickled as it would be between processes, and its bytes are counted: ids, log-probabilities, names and
all. A wire that sends the whole context with each turn grows with the square of the turns; one that sends new tokens
grows with a line. The figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np
from attrs import define, evolve
from claims import Claim, report
from ray import cloudpickle
from turn_cost import CACHE, OracleEngine, parts_for
from workload import Oracle, schemas, tokenizer_of, uniform

from turnwise import EpisodeResult, Task
from turnwise.routing import LeastTokens
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.replica_pool import ReplicaPool
from turnwise.runtime.replica_server import ReplicaServer
from turnwise.runtime.result_wire import pack_episodes
from turnwise.runtime.worker import Worker

TURNS = (4, 8, 16, 32, 64)


@define
class Traffic:
    """Bytes on each way, and what a wire without memory would have sent to the replica."""

    to_replica: int = 0
    to_worker: int = 0
    to_driver: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.to_replica + self.to_worker + self.to_driver

    def carry(self, message: Any, way: str) -> Any:
        """Return a message as it comes out at the other end."""
        packed = cloudpickle.dumps(message, protocol=5)
        setattr(self, way, getattr(self, way) + len(packed))
        return cloudpickle.loads(packed)


async def run(turns: int, episodes: int) -> Traffic:
    """Run episodes over a replica behind a wire that pickles and counts."""
    workload = uniform(episodes, turns=turns)
    tokenizer = tokenizer_of(CACHE)
    engine = OracleEngine(Oracle.of(workload, tokenizer), 0.0)
    server, traffic = ReplicaServer(engine), Traffic()
    pool = ReplicaPool(LeastTokens(), engine.capabilities, 1)
    parts = parts_for(workload, pool, tokenizer, schemas(1), 400 * turns)
    plan = RolloutPlan(default_agent="tool_agent", agent_names=frozenset({"tool_agent"}))
    tasks = [
        Task(messages=tuple(workload.messages(number)), uid=str(number), sample_index=number)
        for number in range(episodes)
    ]

    def deliver(number: int, result: EpisodeResult) -> None:
        traffic.carry(pack_episodes([(number, result)]), "to_driver")

    async with asyncio.TaskGroup() as group:
        server.connect("worker", lambda message: pool.receive(0, traffic.carry(message, "to_worker")))
        pool.replica_up(0, lambda message: server.receive("worker", traffic.carry(message, "to_replica"), group))
        worker = Worker(evolve(parts, on_episode_end=pool.release))
        await worker.run(iter(enumerate(plan.specs(tasks, global_step=0, validation=False))), deliver)
    return traffic


def claims(episodes: int) -> list[Claim]:
    """Measure, print the table, and return what is promised of it."""
    print(f"{'turns':>6s} {'to replica':>12s} {'to worker':>12s} {'to driver':>12s} {'total':>12s}  KB an episode")
    totals = []
    for turns in TURNS:
        traffic = asyncio.run(run(turns, episodes))
        ways = (traffic.to_replica, traffic.to_worker, traffic.to_driver, traffic.total)
        totals.append(traffic.total / episodes)
        print(f"{turns:6d} " + " ".join(f"{way / episodes / 1e3:12.2f}" for way in ways))
    slope, offset = np.polyfit(TURNS, totals, 1)
    off = [abs(slope * turns + offset - total) / total for turns, total in zip(TURNS, totals, strict=True)]
    print(f"line: {slope / 1e3:.2f} KB a turn and {offset / 1e3:.2f} KB an episode")
    return [Claim("bytes on the wire up to 64 turns, farthest from a line (share)", [max(off)], 0.05)]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=32)
    report(claims(parser.parse_args().episodes))


if __name__ == "__main__":
    main()
