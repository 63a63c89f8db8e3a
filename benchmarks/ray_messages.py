"""
Measures the CPU cost of messages on Ray: through channels, as calls of actors, and the connections of either.

    python benchmarks/ray_messages.py [--runs 5]

The messages are the ones of the runtime `ray` (`turnwise.runtime.remote.wire`), with one request or one result each,
and leave one by one, so nothing is coalesced. They travel through channels (`turnwise.runtime.remote.channel`), and
the names that begin with `actor_` are the same messages as calls of Ray actors, without a reply. CPU seconds are read
per process, and an equal loop without messages is subtracted. The machine may be loaded by others: CPU seconds depend
on that far less than wall seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
from attrs import define, evolve
from measurement import describe_machine, format_spread

from turnwise.protocols import ReplicaLoad
from turnwise.runtime.remote.channel import Channel, ChannelAddress, ChannelServer, open_channel
from turnwise.runtime.remote.contexts import ProvedPrefix
from turnwise.runtime.remote.wire import pack_requests, pack_results
from turnwise.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams

GAP_S = 0.001
"""Seconds between two messages: more than one takes, so that none finds another on its way."""


def process_seconds(pid: int | None = None) -> float:
    """Return the CPU seconds of a process so far, with the resolution of the scheduler (Linux)."""
    folder = f"/proc/{pid or os.getpid()}/task"
    total = 0
    for task in os.listdir(folder):
        try:
            with open(f"{folder}/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
        except OSError:  # the thread ended
            continue
    return total / 1e9


def find_daemon(name: str) -> int:
    """Return the process id of a daemon of the cluster that this process started, such as `gcs_server`."""
    for process in psutil.Process().children(recursive=True):
        if name in process.name():
            return process.pid
    raise LookupError(f"no process {name!r} among the descendants of this process")


def a_request(num_tokens: int) -> Any:
    """Return a message of a worker with one request."""
    ids = np.arange(num_tokens, dtype=np.int32)
    sampling = SamplingParams(seed=1, max_tokens=100)
    request = GenerateRequest(request_id="a" * 20, trajectory_id="b" * 16, token_ids=ids, sampling=sampling)
    return pack_requests([(request, ProvedPrefix())])


def a_result(num_tokens: int) -> Any:
    """Return a message of a replica with one result."""
    ids, logprobs = np.arange(num_tokens, dtype=np.int32), np.zeros(num_tokens, np.float32)
    result = GenerateResult(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)
    return pack_results([("a" * 20, result)], load=ReplicaLoad(num_requests=1, num_tokens=1))


class Peer:
    """An actor that sends messages to others and receives them, on an event loop as workers and replicas have."""

    def __init__(self) -> None:
        self._peers: list[Any] = []
        self._channels: list[Channel] = []
        self._num_received = 0
        self._server = ChannelServer(lambda *_client: None, self._count, lambda _number: None)
        gc.collect()
        gc.freeze()

    def _count(self, _number: int, _message: Any) -> None:
        self._num_received += 1

    async def connect(self, peers: Sequence[Any]) -> None:
        """Keep a bound method of each peer, and send each a first message, which opens the connection."""
        self._peers += [peer.receive.options(num_returns=0) for peer in peers]
        for peer in self._peers[-len(peers) :]:
            peer.remote(None)

    async def listen(self) -> ChannelAddress:
        """Accept channels."""
        return await self._server.open("127.0.0.1")

    async def dial(self, addresses: Sequence[ChannelAddress]) -> None:
        """Open a channel to each address."""
        self._channels += [await open_channel(address, "peer") for address in addresses]

    async def receive(self, _message: Any) -> None:
        """Count a message."""
        self._num_received += 1

    async def ping(self) -> int:
        """Return the number of messages so far."""
        return self._num_received

    async def usage(self) -> tuple[int, float]:
        """Return the process id and CPU seconds."""
        return os.getpid(), process_seconds()

    async def send(self, count: int, message: Any, as_calls: bool) -> None:
        """Send messages one by one; None only waits as long."""
        send = self._peers[0].remote if as_calls else self._channels[0].send
        for _ in range(count):
            if message is not None:
                send(message)
            await asyncio.sleep(GAP_S)


@define
class Sending:
    """Two connected actors. `as_calls` sends messages as calls of Ray, and not through a channel."""

    sender: Any
    receiver: Any
    as_calls: bool = False

    def measure(self, count: int, message: Any) -> tuple[float, float]:
        """Return CPU seconds of sender and receiver for each message."""
        import ray

        idle, busy = (self._use(count, each) for each in (None, message))
        ray.get(self.receiver.ping.remote())
        return (busy[0] - idle[0]) / count, (busy[1] - idle[1]) / count

    def _use(self, count: int, message: Any) -> tuple[float, float]:
        import ray

        before = ray.get(self.receiver.ping.remote())
        started = [ray.get(each.usage.remote())[1] for each in (self.sender, self.receiver)]
        ray.get(self.sender.send.remote(count, message, self.as_calls))
        while message is not None and ray.get(self.receiver.ping.remote()) < before + count:
            time.sleep(0.05)
        ended = [ray.get(each.usage.remote())[1] for each in (self.sender, self.receiver)]
        return ended[0] - started[0], ended[1] - started[1]


def measure_messages(runs: int) -> dict[str, list[float]]:
    """Return seconds per message, per byte and per call with a reply."""
    import ray

    pair = Sending(ray.remote(Peer).remote(), ray.remote(Peer).remote())
    ray.get(pair.sender.connect.remote([pair.receiver]))
    ray.get(pair.sender.dial.remote([ray.get(pair.receiver.listen.remote())]))
    calls = evolve(pair, as_calls=True)
    for each in (pair, calls):
        each.measure(200, a_request(250))
    found: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(runs):
        send, receive = pair.measure(500, a_request(250))
        add("request_send_s", send)
        add("request_receive_s", receive)
        send_back, receive_back = pair.measure(500, a_result(250))
        add("result_send_s", send_back)
        add("result_receive_s", receive_back)
        send, receive = calls.measure(500, a_request(250))
        add("actor_send_s", send)
        add("actor_receive_s", receive)
        for each, prefix in ((pair, "channel_"), (calls, "")):
            sizes = (250, 24_000, 400_000)
            costs = [each.measure(200, a_request(size)) for size in sizes]
            # Up to 100 KB travel inside a call, more in the object store.
            for index, name in enumerate(("send", "receive")):
                large_s = (costs[2][index] - costs[0][index]) / (4 * (sizes[2] - sizes[0]))
                small_s = (costs[1][index] - costs[0][index]) / (4 * (sizes[1] - sizes[0]))
                add(f"{prefix}{name}_byte_s", small_s if each.as_calls else large_s)
                if each.as_calls:
                    add(f"{name}_store_byte_s", large_s)
        for name, value in measure_calls(pair.receiver).items():
            add(name, value)
    for actor in (pair.sender, pair.receiver):
        ray.kill(actor)
    return found


def measure_calls(actor: Any) -> dict[str, float]:
    """Return CPU seconds of the caller for a call with a reply, and for a message without one; of both sides."""
    import ray

    async def call(count: int, ask: Callable[[], Any]) -> tuple[float, float]:
        before, other = process_seconds(), ray.get(actor.usage.remote())[1]
        for _ in range(count):
            await ask()
            await asyncio.sleep(GAP_S)
        return (process_seconds() - before) / count, (ray.get(actor.usage.remote())[1] - other) / count

    async def nothing() -> None:
        """Do nothing."""

    async def post() -> None:
        actor.receive.options(num_returns=0).remote(None)

    idle, called, posted = (asyncio.run(call(300, each)) for each in (nothing, actor.ping.remote, post))
    return {
        "call_s": called[0] - idle[0],
        "reply_s": called[1] - idle[1],
        "post_s": posted[0] - idle[0],
    }


def measure_channels(size: int, runs: int) -> dict[str, list[float]]:
    """Return CPU seconds of opening a channel, at the client and at the server."""
    import ray

    found: dict[str, list[float]] = {"dial_s": [], "accept_s": []}
    for _ in range(runs):
        client, server = (ray.remote(Peer).remote() for _ in range(2))
        address = ray.get(server.listen.remote())
        ray.get(client.dial.remote([address]))
        before = [ray.get(each.usage.remote())[1] for each in (client, server)]
        ray.get(client.dial.remote([address] * size))
        for name, each, start in zip(found, (client, server), before, strict=True):
            found[name].append((ray.get(each.usage.remote())[1] - start) / size)
            ray.kill(each)
    return found


def measure_mesh(sizes: Sequence[int] = (2, 4, 6, 8)) -> dict[str, list[float]]:
    """Return CPU seconds of the head node for an actor, a pair of actors and a death, for meshes of some sizes."""
    import ray

    head, rows = find_daemon("gcs_server"), []
    before = process_seconds(head)
    time.sleep(10.0)
    idle = (process_seconds(head) - before) / 10.0
    for size in sizes:
        before = process_seconds(head)
        actors = [ray.remote(Peer).options(num_cpus=0).remote() for _ in range(2 * size)]
        ray.get([actor.usage.remote() for actor in actors])
        started = process_seconds(head)
        half, other = actors[:size], actors[size:]
        connecting_at = time.perf_counter()
        ray.get([actor.connect.remote(other) for actor in half] + [actor.connect.remote(half) for actor in other])
        while sum(ray.get([actor.ping.remote() for actor in actors])) < 2 * size * size:
            time.sleep(0.05)
        connected = process_seconds(head) - idle * (time.perf_counter() - connecting_at)
        last = ray.get([actor.usage.remote() for actor in actors])
        for actor in actors:
            ray.kill(actor)
        for pid, *_ in last:
            while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
        time.sleep(1.0)  # the head node learns of the deaths; it takes no time that this process could wait for
        ended = process_seconds(head)
        pairs = size * size
        rows.append(
            (
                (started - before) / (2 * size),
                (connected - started) / pairs,
                (ended - connected) / (2 * size),
            )
        )
    names = ("gcs_actor_s", "actor_gcs_pair_s", "gcs_death_s")
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def measure(runs: int) -> dict[str, list[float]]:
    """Measure everything on a separate cluster."""
    import ray

    ray.init("local", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        return {**measure_messages(runs), **measure_channels(200, runs), **measure_mesh()}
    finally:
        ray.shutdown()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs (default: %(default)s)")
    arguments = parser.parse_args()
    print(describe_machine())
    print(f"medians (min-max) of {arguments.runs} runs; microseconds of CPU, nanoseconds per byte")
    for name, values in measure(arguments.runs).items():
        scale = 1e9 if name.endswith("byte_s") else 1e6
        print(f"{name:24s} {format_spread([each * scale for each in values])}", flush=True)


if __name__ == "__main__":
    main()
