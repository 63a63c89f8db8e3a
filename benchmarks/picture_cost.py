"""
Measures the bytes of pictures between driver, workers and replicas, and the memory that holds them.

    python benchmarks/picture_cost.py [--episodes 100] [--pictures 8] [--kilobytes 100] [--ray] [--strict]

The messages are those of the runtime `ray`, pickled as between processes; there is no model. Each episode has
another task with other pictures, and asks one of the replicas in each turn. Without a store, all pictures would travel
with each request. The results do not depend on the machine. One process plays all parts and holds each picture once for
all of them. So its peak of memory counts the pictures and the URLs of messages once; several processes need more. With
`--ray`, the processes are real ones, which count the bytes that come.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tracemalloc
from typing import Any

import numpy as np
import picture_cluster
from attrs import define, evolve, field
from claims import Claim, report
from ray import cloudpickle

from turnwise import EpisodeResult, FinishReason, GenerateRequest, GenerateResult, SamplingParams, Status, Task
from turnwise.media import Picture, PlacedPicture, picture_part, read_picture_part
from turnwise.record.spec import EpisodeSpec
from turnwise.record.trajectory import Trajectory
from turnwise.runtime.remote.picture_packets import PacketReceiver, PacketSender
from turnwise.runtime.remote.picture_store import PictureStore
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.runtime.remote.result_wire import pack_episodes, unpack_episodes
from turnwise.types import MediaTokens
from turnwise_routers import LeastTokens
from turnwise_testing.engines.scripted import ScriptedEngine

TURNS = 4
NUM_WORKERS = NUM_REPLICAS = 2
PLACEHOLDERS = 16


@define
class Link:
    """Counts the bytes of one direction, and pickles."""

    num_bytes: int = 0

    def carry(self, message: Any) -> Any:
        """Return a message as the other process gets it."""
        packed = cloudpickle.dumps(message, protocol=5)
        self.num_bytes += len(packed)
        return cloudpickle.loads(packed)


class Seeing(ScriptedEngine):
    """Answers with one token, and counts the pictures that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = evolve(self.capabilities, pictures=True)
        self.num_pictures = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.num_pictures += len(request.pictures)
        return GenerateResult(token_ids=[1], logprobs=[-0.5], finish_reason=FinishReason.STOP)


@define
class Cluster:
    """The parts of a run."""

    servers: list[ReplicaServer]
    pools: list[ReplicaPool] = field(factory=list)
    to_worker: Link = field(factory=Link)
    to_replica: Link = field(factory=Link)
    to_driver: Link = field(factory=Link)

    @classmethod
    def start(cls, group: asyncio.TaskGroup) -> Cluster:
        """Connect each worker with each replica."""
        # In one process, a picture that another part holds is no picture of this replica.
        stores = [PictureStore(find_in_use=lambda _name: None) for _ in range(NUM_REPLICAS)]
        cluster = cls([ReplicaServer(Seeing(), pictures=store) for store in stores])
        loop, answers = asyncio.get_running_loop(), Link()
        for worker in range(NUM_WORKERS):
            pool = ReplicaPool(LeastTokens(), Seeing().capabilities, NUM_REPLICAS)
            cluster.pools.append(pool)
            for index, server in enumerate(cluster.servers):

                def answer(message: Any, pool: ReplicaPool = pool, index: int = index) -> None:
                    loop.call_soon(pool.receive, index, answers.carry(message))

                def send(message: Any, worker: int = worker, server: ReplicaServer = server) -> None:
                    loop.call_soon(server.receive, worker, cluster.to_replica.carry(message), group)

                server.connect(worker, answer)
                pool.replica_up(index, send)
        return cluster


def make_task(number: int, num_pictures: int, num_bytes: int) -> Task:
    """Return a task with its own pictures, of random bytes."""
    parts = [
        picture_part(Picture(data=b"\x89PNG\r\n\x1a\n" + os.urandom(num_bytes - 8), media_type="image/png"))
        for _ in range(num_pictures)
    ]
    return Task(messages=({"role": "user", "content": parts},), uid=f"t{number}")


async def run_episode(pool: ReplicaPool, spec: EpisodeSpec) -> EpisodeResult:
    """Ask for four turns behind the pictures of a task."""
    pictures = [read_picture_part(part) for part in spec.task.messages[0]["content"]]
    placed = [
        PlacedPicture(start=PLACEHOLDERS * place, num_tokens=PLACEHOLDERS, picture=picture)
        for place, picture in enumerate(pictures)
    ]
    record = Trajectory(MediaTokens(token_ids=np.zeros(PLACEHOLDERS * len(placed) + 1, np.int32), pictures=placed))
    for turn in range(TURNS):
        request = GenerateRequest(
            request_id=f"{spec.task.uid}-{turn}",
            trajectory_id=spec.task.uid,
            token_ids=record.input_ids,
            sampling=SamplingParams(max_tokens=1),
            pictures=record.pictures,
        )
        result = await pool.generate(request)
        record.add_action(result.token_ids, result.logprobs)
    pool.release(spec.task.uid)
    messages = (*spec.task.messages, {"role": "assistant", "content": "seen"})
    return EpisodeResult(task=spec.task, status=Status.COMPLETED, messages=messages, trajectories=(record,))


async def run(num_episodes: int, num_pictures: int, num_bytes: int) -> tuple[Cluster, int]:
    """Run episodes on two workers and two replicas; return the counts and the peak of memory in bytes."""
    tasks = [make_task(number, num_pictures, num_bytes) for number in range(num_episodes)]
    tracemalloc.start()
    async with asyncio.TaskGroup() as group:
        cluster = Cluster.start(group)
        results: list[EpisodeResult] = []

        async def work(worker: int) -> None:
            given, taken, done, kept = PacketSender(), PacketReceiver(), PacketSender(), PacketReceiver()
            for number in range(worker, num_episodes, NUM_WORKERS):
                packet = given.pack([(number, EpisodeSpec(task=tasks[number], agent_name="a"))])
                ((_number, spec),) = taken.unpack(cluster.to_worker.carry(packet))
                result = await run_episode(cluster.pools[worker], spec)
                message = kept.unpack(cluster.to_driver.carry(done.pack(pack_episodes([(number, result)]))))
                results.extend(each for _number, each in unpack_episodes(message))

        async with asyncio.TaskGroup() as working:
            for worker in range(NUM_WORKERS):
                working.create_task(work(worker))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_episodes * TURNS * num_pictures == sum(server.engine.num_pictures for server in cluster.servers)
    return cluster, peak


def measure_claims(num_episodes: int, num_pictures: int, num_bytes: int) -> list[Claim]:
    """Measure, print the table and return the claims."""
    cluster, peak = asyncio.run(run(num_episodes, num_pictures, num_bytes))
    total = num_episodes * num_pictures * num_bytes
    print(f"{num_episodes} episodes of {num_pictures} pictures and {TURNS} turns: {total / 1e6:.1f} MB of pictures")
    directions = {"driver to workers": cluster.to_worker, "to replicas": cluster.to_replica}
    directions["workers to driver"] = cluster.to_driver
    for name, link in directions.items():
        print(f"{name:18s} {link.num_bytes / 1e6:8.2f} MB  {link.num_bytes / total:6.3f} times the pictures")
    stored = sum(server.pictures.num_bytes for server in cluster.servers)
    print(f"{'held by replicas':18s} {stored / 1e6:8.2f} MB  {stored / total:6.3f} times the pictures")
    print(f"{'peak of memory':18s} {peak / 1e6:8.2f} MB  {peak / total:6.3f} times the pictures, all parts together")
    worst = max(link.num_bytes for link in directions.values()) / total
    return [
        Claim("bytes of a direction, for each byte of the pictures", [worst], 1.05),
        Claim("bytes that replicas hold, for each byte of the pictures", [stored / total], 1.0),
    ]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=8, help="of each episode (default: %(default)s)")
    parser.add_argument("--kilobytes", type=int, default=100, help="of each picture (default: %(default)s)")
    parser.add_argument("--ray", action="store_true", help="count in the processes of two workers and two replicas")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a claim does not hold")
    arguments = parser.parse_args()
    measure = picture_cluster.measure_claims if arguments.ray else measure_claims
    failed = report(measure(arguments.episodes, arguments.pictures, 1000 * arguments.kilobytes))
    if arguments.strict and failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
