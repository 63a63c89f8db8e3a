"""
Measures the bytes between worker, replica and driver by the number of turns.

    python benchmarks/wire_cost.py [--episodes 32]

Every message is pickled as between processes, and all its bytes count. A protocol that sends the whole context each
turn grows quadratically with the number of turns; one that sends only new tokens grows linearly. The results do not
depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np
from attrs import define, evolve
from claims import Claim, report
from ray import cloudpickle
from turn_cost import CACHE, PLAN, OracleEngine, build_components
from workload import Oracle, load_tokenizer, schemas, uniform

from turnwise import EpisodeResult
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.runtime.remote.result_wire import pack_episodes
from turnwise.runtime.worker import Worker
from turnwise_routers import LeastTokens

TURNS = (4, 8, 16, 32, 64)


@define
class Traffic:
    """Bytes sent in each direction."""

    to_replica: int = 0
    to_worker: int = 0
    to_driver: int = 0

    @property
    def total(self) -> int:
        """Bytes in all directions."""
        return self.to_replica + self.to_worker + self.to_driver

    def send(self, message: Any, direction: str) -> Any:
        """Count a message's bytes and return its unpickled copy."""
        packed = cloudpickle.dumps(message, protocol=5)
        setattr(self, direction, getattr(self, direction) + len(packed))
        return cloudpickle.loads(packed)


async def run(turns: int, episodes: int) -> Traffic:
    """Run episodes on one replica; pickle and count every message."""
    workload = uniform(episodes, turns=turns)
    tokenizer = load_tokenizer(CACHE)
    engine = OracleEngine(Oracle.of(workload, tokenizer), 0.0)
    server, traffic = ReplicaServer(engine), Traffic()
    pool = ReplicaPool(LeastTokens(), engine.capabilities, 1)
    components = build_components(workload, pool, tokenizer, schemas(1), 400 * turns)

    def deliver(number: int, result: EpisodeResult) -> None:
        traffic.send(pack_episodes([(number, result)]), "to_driver")

    async with asyncio.TaskGroup() as group:
        server.connect(0, lambda message: pool.receive(0, traffic.send(message, "to_worker")))
        pool.replica_up(0, lambda message: server.receive(0, traffic.send(message, "to_replica"), group))
        worker = Worker(evolve(components, on_episode_end=pool.release))
        specs = PLAN.specs(workload.tasks(), global_step=0, validation=False)
        await worker.run(EpisodeFeed.of(specs), deliver)
    return traffic


def measure_claims(episodes: int) -> list[Claim]:
    """Measure, print the table and return the claims."""
    print(f"{'turns':>6s} {'to replica':>12s} {'to worker':>12s} {'to driver':>12s} {'total':>12s}  KB per episode")
    totals = []
    for turns in TURNS:
        traffic = asyncio.run(run(turns, episodes))
        columns = (traffic.to_replica, traffic.to_worker, traffic.to_driver, traffic.total)
        totals.append(traffic.total / episodes)
        print(f"{turns:6d} " + " ".join(f"{each / episodes / 1e3:12.2f}" for each in columns))
    slope, offset = np.polyfit(TURNS, totals, 1)
    deviations = [abs(slope * turns + offset - total) / total for turns, total in zip(TURNS, totals, strict=True)]
    print(f"linear fit: {slope / 1e3:.2f} KB per turn and {offset / 1e3:.2f} KB per episode")
    return [Claim("bytes up to 64 turns, largest relative deviation from linear", [max(deviations)], 0.05)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=32, help="episodes per run (default: %(default)s)")
    report(measure_claims(parser.parse_args().episodes))


if __name__ == "__main__":
    main()
