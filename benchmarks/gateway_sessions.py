"""
Measures the memory of idle sessions and the latency of calls of the gateway, on one event loop.

    python benchmarks/gateway_sessions.py [--idle 1000] [--at-once 1 32 256] [--rate 100]

Memory is the resident size of the process with driver and gateway: with one session, with all, and after one call of
each. Latency is measured by agents in another process, from the request to the end of the response; the engine answers
at once. The agents pause at random, so that all together make about `--rate` calls in a second. Bodies have 4 to 12 KB.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
from collections.abc import Callable
from typing import Any

import psutil
from attrs import define, field
from gateway_clients import CLIENTS, NUM_TOOLS, Clients, build_manager
from measurement import describe_machine
from turn_cost import CACHE, OracleEngine, check_result
from workload import Oracle, load_tokenizer, schemas, uniform

from turnwise import Task
from turnwise.events.logging import configure_logging

MEGABYTE = 1024 * 1024


def read_memory() -> float:
    """Return the resident megabytes of this process."""
    gc.collect()
    return float(psutil.Process().memory_info().rss) / MEGABYTE


@define
class IdleAgents:
    """Agents that are there, call once when all are there, and leave when all have called."""

    num_agents: int
    num_here: int = 0
    num_called: int = 0
    memory: dict[str, float] = field(factory=dict)
    _calls: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(16))
    _may_call: asyncio.Event = field(factory=asyncio.Event)
    _may_leave: asyncio.Event = field(factory=asyncio.Event)

    async def visit(self, task: Task, client: Any) -> None:
        """Hold a session of one call."""
        import aiohttp

        self.num_here += 1
        if self.num_here == 1:
            await self._call(task, client, aiohttp.ClientSession)  # loads and starts all that one session needs
            self.memory["one session"] = read_memory()
        if self.num_here == self.num_agents:
            self.memory["all sessions, no call"] = read_memory()
            self._may_call.set()
        await self._may_call.wait()
        async with self._calls:
            await self._call(task, client, aiohttp.ClientSession)
        self.num_called += 1
        if self.num_called == self.num_agents:
            self.memory["all sessions, one call each"] = read_memory()
            self._may_leave.set()
        await self._may_leave.wait()

    async def _call(self, task: Task, client: Any, open_session: Callable[[], Any]) -> None:
        headers = {"Authorization": f"Bearer {client.api_key}"}
        body = {"model": "policy", "messages": list(task.messages), "tools": schemas(NUM_TOOLS)}
        async with (
            open_session() as session,
            session.post(f"{client.openai_base_url}/chat/completions", json=body, headers=headers) as response,
        ):
            response.raise_for_status()
            await response.read()


IDLE: list[IdleAgents] = []
"""The agents of the current measurement; the agent's function finds them here."""


async def visit(task: Task, client: Any) -> None:
    """Hold an idle session."""
    await IDLE[-1].visit(task, client)


def measure_memory(tokenizer: Any, num_sessions: int) -> dict[str, float]:
    """Return the resident megabytes by the state of the sessions."""
    import gateway_sessions  # the agent's function is looked up there, and not in `__main__`

    workload = uniform(num_sessions, turns=2, tokens=100)
    engine = OracleEngine(Oracle.of(workload, tokenizer), 0.0)
    gateway_sessions.IDLE.append(agents := gateway_sessions.IdleAgents(num_sessions))
    with build_manager(workload, engine, tokenizer, num_sessions, "gateway_sessions:visit") as manager:
        manager.rollout(workload.tasks())
    return agents.memory


def measure_latency(tokenizer: Any, at_once: int, rate: float) -> list[float]:
    """Return the sorted milliseconds of calls, those of the first run left out."""
    workload = uniform(max(at_once, 64), turns=4, tokens=100, reply_chars=1500)
    oracle = Oracle.of(workload, tokenizer)
    CLIENTS.append(clients := Clients.start(workload.reply_chars, at_once / rate))
    try:
        with build_manager(workload, OracleEngine(oracle, 0.0), tokenizer, at_once, "gateway_clients:solve") as manager:
            for index in range(2):
                if index:
                    clients.seconds.clear()
                for result in manager.rollout(workload.tasks()):
                    check_result(result, oracle.script)
    finally:
        clients.stop()
    return sorted(1e3 * seconds for seconds in clients.seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000, help="idle sessions (default: %(default)s)")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 32, 256], help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=100.0, help="calls in a second (default: %(default)s)")
    options = parser.parse_args()
    configure_logging("warning")
    tokenizer = load_tokenizer(CACHE)
    print(describe_machine())
    memory = measure_memory(tokenizer, options.idle)
    base = memory["one session"]
    print(f"resident MB of {options.idle} sessions; with one session {base:.0f}")
    for name in ("all sessions, no call", "all sessions, one call each"):
        print(f"{name:30s} +{memory[name] - base:.1f}")
    print(f"milliseconds of a call at about {options.rate:g} calls in a second")
    for at_once in options.at_once:
        found = measure_latency(tokenizer, at_once, options.rate)
        cuts = statistics.quantiles(found, n=100)
        print(f"{at_once:4d} sessions: p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f}, {len(found)} calls", flush=True)


if __name__ == "__main__":
    main()
