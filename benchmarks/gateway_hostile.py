"""
Measures how long an honest agent waits for a reply beside an agent that sends hostile bodies.

    python benchmarks/gateway_hostile.py [--context 512] [--at-once 8] [--only TEXT]

The server is a process with a session for each of the two agents and an engine that answers at once. For each body of
the tests' table, the hostile agent sends it some times at once, and the honest one calls in a loop until all are
answered. The figures are the longest wait of the honest agent, the time until the last hostile answer, and the memory
of the server: before, the most during, and afterwards. Other processes of the machine lengthen all waits, so the first
line is a run without a hostile body.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import structlog
from attrs import frozen
from measurement import describe_machine

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "gateway" / "tests"))  # the table of bodies is a test's
from hostile_bodies import HOSTILE, PATHS, USER, Hostile

from turnwise import State
from turnwise_gateway.server import GatewayServer, SessionDirectory
from turnwise_gateway.session.options import SessionOptions
from turnwise_gateway.session.session import Session, SessionParts
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_resources

HONEST = json.dumps({"model": "m", "messages": [USER]}).encode()
QUIET = Hostile("none", PATHS["chat"], lambda: HONEST)


@frozen
class Server:
    """A running server: its port, and the keys of the two sessions."""

    process: subprocess.Popen[str]
    port: int
    keys: tuple[str, str]

    def post(self, number: int, path: str, body: bytes) -> int:
        """Send a request with the key of a session, and return the status of its answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"Authorization": f"Bearer {self.keys[number]}", "Content-Type": "application/json"}
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status


@frozen
class OpenAgent:
    """Keeps a session open until the server ends."""

    parts: SessionParts
    directory: SessionDirectory
    keys: asyncio.Queue[str]
    ended: asyncio.Event
    resumable = False

    async def step(self, episode: Any) -> State:
        async with asyncio.TaskGroup() as group:
            session = Session(episode, self.parts, f"s-{episode.task.uid}", group.create_task)
            self.keys.put_nowait(self.directory.add(session.name, session))
            await self.ended.wait()
            session.close()
        return State.TERMINATED


async def serve(context: int) -> None:
    """Serve two sessions until the standard input ends."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    resources = probe_resources()
    # Only engine and limits of the probe are used; it makes no agent.
    probe = AgentProbe(make_agent=lambda: None, resources=resources, turns=("Done.",))  # type: ignore[arg-type,return-value]
    options = SessionOptions(max_calls=10**6)
    parts = SessionParts(chat=probe.chat, parser=resources.parser, options=options)
    directory, keys, ended = SessionDirectory("m"), asyncio.Queue[str](), asyncio.Event()
    limits = probe.limits(prompt_length=context // 2, response_length=context // 2, max_records=10**6)
    agent = OpenAgent(parts, directory, keys, ended)
    engine = probe.engine()
    await engine.start()
    async with GatewayServer(directory) as server, asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(probe.run(make_task(number), agent=agent, engine=engine, limits=limits))
        opened = [await keys.get() for _ in range(2)]
        sys.stdout.write(json.dumps([server.port, opened]) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
        ended.set()


def start(context: int) -> Server:
    """Start the server."""
    command = [sys.executable, __file__, "--serve", "--context", str(context)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    port, keys = json.loads(process.stdout.readline())
    return Server(process, port, tuple(keys))


def measure(server: Server, hostile: Hostile, at_once: int) -> tuple[float, float, set[int]]:
    """Return the longest honest wait, the seconds of the hostile requests, and the status of their answers."""
    body, statuses = hostile.build(), set[int]()
    started = time.perf_counter()

    def attack() -> None:
        statuses.add(server.post(0, hostile.path, body))

    threads = [threading.Thread(target=attack) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    longest = 0.0
    while any(thread.is_alive() for thread in threads):
        before = time.perf_counter()
        server.post(1, PATHS["chat"], HONEST)
        longest = max(longest, time.perf_counter() - before)
    return longest, time.perf_counter() - started, statuses


def forget_most_memory(pid: int) -> None:
    """Let the system measure the most memory of a process anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def read_most_memory(pid: int) -> int:
    """Return the most resident bytes of a process since then."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measure all bodies, and print a line for each."""
    parser = argparse.ArgumentParser(description="Measure the wait of an honest agent beside a hostile one.")
    parser.add_argument("--context", type=int, default=512, help="tokens of prompt and response together")
    parser.add_argument("--at-once", type=int, default=1, help="equal hostile requests at once")
    parser.add_argument("--rounds", type=int, default=1, help="times that the whole table is measured")
    parser.add_argument("--only", default="", help="only bodies whose name has this text")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.context))
        return
    print(describe_machine())
    server = start(arguments.context)
    process = psutil.Process(server.process.pid)
    try:
        for hostile in (QUIET, *(each for each in HOSTILE if arguments.only in each.name)) * arguments.rounds:
            before = process.memory_info().rss
            forget_most_memory(process.pid)
            longest, seconds, statuses = measure(server, hostile, arguments.at_once)
            memory = [before, read_most_memory(process.pid), process.memory_info().rss]
            mib = " ".join(f"{each / 2**20:6.0f}" for each in memory)
            line = f"{longest * 1000:8.1f} ms longest wait  {seconds:7.2f} s  {mib} MiB  {sorted(statuses)}"
            print(f"{hostile.name:45} {line}", flush=True)
    finally:
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.wait()


if __name__ == "__main__":
    main()
