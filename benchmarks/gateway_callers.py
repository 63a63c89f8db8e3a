"""
Measures the check that a connection comes from a process of an agent's program, which binds keys to programs.

    python benchmarks/gateway_callers.py [--programs 1000] [--sockets 1000]

It starts idle programs, each with a child, and opens connections between sockets of this process. Then it looks for the
owner of a connection of a program itself, of a new child of a program, and of a process of no program. The figures are
the median and the longest of the looks, one after the other; a connection is looked at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

import structlog
from measurement import describe_machine

from turnwise.descriptors import raise_descriptor_limit
from turnwise_gateway.programs.callers import ProcessCensus, ProgramCallers
from turnwise_gateway.programs.orphans import VARIABLE
from turnwise_gateway.programs.peer_socket import Address

ROUNDS = 50
IDLE = ["sh", "-c", "sleep 600 & wait"]
CONNECT = """
import socket, sys
kept = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
sys.stdin.read()
"""
CALL_ITSELF = [sys.executable, "-c", CONNECT]
CALLERS = {
    "the program itself": CALL_ITSELF,
    "a new child of the program": ["sh", "-c", '"$0" "$@"; true', *CALL_ITSELF],
    "a new child in a separate session": ["sh", "-c", 'setsid "$0" "$@"; true', *CALL_ITSELF],
}
MARK, OTHER = "w.caller", "w.other"
KEPT: list[socket.socket] = []


def start_idle() -> subprocess.Popen[bytes]:
    """Start an idle program."""
    return subprocess.Popen(IDLE, start_new_session=True, env={**os.environ, VARIABLE: OTHER})


def accept(command: list[str]) -> tuple[subprocess.Popen[bytes], list[tuple[Address, Address]]]:
    """Start a program that connects; return it with the ends of its connections, which stay open."""
    with socket.create_server(("127.0.0.1", 0), backlog=ROUNDS) as listener:
        arguments = [*command, str(listener.getsockname()[1]), str(ROUNDS)]
        process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, VARIABLE: MARK}
        )
        accepted = [listener.accept()[0] for _ in range(ROUNDS)]
    KEPT.extend(accepted)
    return process, [(each.getpeername(), each.getsockname()) for each in accepted]


async def measure(census: ProcessCensus, leader: int, mark: str, ends: list[tuple[Address, Address]]) -> str:
    """Return the figures of the looks for a program, each of which knows nothing of the earlier ones."""
    seconds = []
    for client, server in ends:
        callers = ProgramCallers("s", census)
        callers.begin(leader, mark)
        started = time.perf_counter()
        assert await callers.admits(client, server) == (mark == MARK)
        seconds.append(time.perf_counter() - started)
    return f"{statistics.median(seconds) * 1000:8.2f} ms median  {max(seconds) * 1000:8.2f} ms longest"


async def main() -> None:
    """Measure, and print a line for each caller."""
    parser = argparse.ArgumentParser(description="Measure the check of callers.")
    parser.add_argument("--programs", type=int, default=1000, help="idle programs, each of two processes")
    parser.add_argument("--sockets", type=int, default=1000, help="further connections of this process")
    arguments = parser.parse_args()
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    raise_descriptor_limit()
    print(describe_machine())
    programs = [start_idle() for _ in range(arguments.programs)]
    with socket.create_server(("127.0.0.1", 0), backlog=arguments.sockets) as listener:
        for _ in range(arguments.sockets):
            KEPT.append(socket.create_connection(listener.getsockname()))
            KEPT.append(listener.accept()[0])
    census = ProcessCensus()
    try:
        for name, command in CALLERS.items():
            process, ends = accept(command)
            programs.append(process)
            print(f"{name:36} {await measure(census, process.pid, MARK, ends)}", flush=True)
        print(f"{'a process of another program':36} {await measure(census, programs[0].pid, OTHER, ends)}")
    finally:
        for each in programs:
            os.killpg(each.pid, signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main())
