"""
Measures the memory of idle sessions and the latency of calls of the gateway, on one event loop.

    python benchmarks/gateway_sessions.py [--idle 1000] [--at-once 1 32 256] [--rate 175] [--rounds 4] [--large 2]

Memory is the resident size of the process with driver and gateway: with one session, with all, and after one call of
each. Latency is measured by agents in another process, from the request to the end of the response; the engine answers
at once. The agents pause at random, so that all together make about `--rate` calls in a second. Bodies have 4 to 12 KB.

The calls are measured with Python's own garbage collections, and with those of `turnwise gateway serve`, which freezes
the objects of the start and lets full collections wait for growth, in turns; and once more beside an agent that calls
without a pause, with bodies of `--large` MB. Calls of the first seconds do not count: all sessions open at once there,
as no service does it. Collections count from the first moment. A round takes three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import psutil
from attrs import define, field, frozen
from gateway_clients import CLIENTS, NUM_TOOLS, Clients, build_manager
from measurement import describe_machine
from turn_cost import CACHE, OracleEngine, check_result
from workload import Oracle, load_tokenizer, schemas, uniform

from turnwise import Task
from turnwise.collector import freeze_start, full_collections_on_growth
from turnwise.events.logging import configure_logging

MEGABYTE = 1024 * 1024
TURNS = 4
STEADY_S = 10.0
"""Seconds of a run that count."""


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
    objects: dict[str, Counter[str]] = field(factory=dict)
    _calls: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(16))
    _may_call: asyncio.Event = field(factory=asyncio.Event)
    _may_leave: asyncio.Event = field(factory=asyncio.Event)

    async def visit(self, task: Task, client: Any) -> None:
        """Hold a session of one call."""
        import aiohttp

        self.num_here += 1
        if self.num_here == 1:
            await self._call(task, client, aiohttp.ClientSession)  # loads and starts all that one session needs
            self._measure("one session")
        if self.num_here == self.num_agents:
            self._measure("all sessions, no call")
            self._may_call.set()
        await self._may_call.wait()
        async with self._calls:
            await self._call(task, client, aiohttp.ClientSession)
        self.num_called += 1
        if self.num_called == self.num_agents:
            self._measure("all sessions, one call each")
            self._may_leave.set()
        await self._may_leave.wait()

    def _measure(self, state: str) -> None:
        self.memory[state] = read_memory()
        self.objects[state] = Counter(type(each).__qualname__ for each in gc.get_objects())

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


def measure_memory(tokenizer: Any, num_sessions: int) -> tuple[dict[str, float], Counter[str]]:
    """Return the resident megabytes by the state of the sessions, and the objects of a session by their kinds."""
    import gateway_sessions  # the agent's function is looked up there, and not in `__main__`

    workload = uniform(num_sessions, turns=2, tokens=100)
    engine = OracleEngine(Oracle.of(workload, tokenizer), 0.0)
    gateway_sessions.IDLE.append(agents := gateway_sessions.IdleAgents(num_sessions))
    with build_manager(workload, engine, tokenizer, num_sessions, "gateway_sessions:visit") as manager:
        manager.rollout(workload.tasks())
    # The first session has loaded and started all that they share.
    more = agents.objects["all sessions, one call each"] - agents.objects["one session"]
    return agents.memory, Counter({name: number / (num_sessions - 1) for name, number in more.items()})


@define
class Pauses:
    """
    Times the garbage collections of this process inside a `with` statement.

    Attributes:
        milliseconds: of each collection of the oldest generation, and of the longest of the others.
    """

    milliseconds: list[float] = field(factory=list)
    longest_young: float = 0.0
    _started: float = 0.0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
            return
        spent = 1e3 * (time.perf_counter() - self._started)
        if info["generation"] == 2:
            self.milliseconds.append(spent)
        else:
            self.longest_young = max(self.longest_young, spent)


@define
class Latency:
    """
    Calls of one kind of run, over all rounds.

    Attributes:
        seconds: of each call in the steady state.
        spans: seconds from the first to the last of these calls, of each run.
        full: milliseconds of each full collection.
        young: of the longest other collection.
        busy: share of the time of each run, start included, in which the event loop computed.
    """

    seconds: list[float] = field(factory=list)
    spans: list[float] = field(factory=list)
    full: list[float] = field(factory=list)
    young: float = 0.0
    busy: list[float] = field(factory=list)

    def add(self, calls: list[tuple[float, float]], skipped_s: float) -> None:
        """Add the calls of a run, by start and seconds, without those of its first seconds."""
        first = min(started for started, _ in calls)
        steady = [(started, seconds) for started, seconds in calls if started - first > skipped_s]
        self.seconds += [seconds for _, seconds in steady]
        self.spans.append(max(started for started, _ in steady) - first - skipped_s)

    def describe(self) -> str:
        """Return one line of figures, in milliseconds."""
        cuts = statistics.quantiles(self.seconds, n=100)
        longest = f"{max(self.full):.0f}" if self.full else "none"
        return (
            f"p50 {1e3 * cuts[49]:.1f}, p99 {1e3 * cuts[98]:.1f}, longest call {1e3 * max(self.seconds):.0f}, "
            f"{len(self.full)} full collections, the longest {longest}; the longest other {self.young:.1f}; "
            f"{len(self.seconds)} calls, {len(self.seconds) / sum(self.spans):.0f} in a second, "
            f"the event loop computes {100 * statistics.mean(self.busy):.0f} % of the time"
        )


@frozen
class Case:
    """A number of sessions at once, and the bytes that one of them adds to each of its requests."""

    at_once: int
    padding: int = 0

    def __str__(self) -> str:
        beside = f" beside one with {self.padding / 1e6:g} MB bodies" if self.padding else ""
        return f"{self.at_once} sessions{beside}"


async def read_thread_time() -> float:
    """Return the processor seconds of the event loop's thread."""
    return time.thread_time()


def measure_latency(tokenizer: Any, case: Case, rate: float, found: dict[bool, Latency], order: list[bool]) -> None:
    """Add calls with the collections of a served gateway and with Python's, in an order, after a run that warms up."""
    pause_s = case.at_once / rate
    skipped_s = 1.0 + 2 * pause_s
    num_tasks = math.ceil((skipped_s + STEADY_S) * rate / TURNS)
    workload = uniform(num_tasks, turns=TURNS, tokens=100, reply_chars=1500)
    oracle = Oracle.of(workload, tokenizer)
    CLIENTS.append(clients := Clients.start(workload.reply_chars, pause_s, case.padding))
    engine = OracleEngine(oracle, 0.0)
    try:
        with build_manager(workload, engine, tokenizer, case.at_once, "gateway_clients:solve") as manager:
            manager.rollout(workload.tasks()[: max(case.at_once, 16)])
            for is_served in order:
                clients.calls.clear()
                if is_served:
                    freeze_start()
                else:
                    gc.collect()  # as before the other kind, so that both begin with the same objects
                started, before = time.perf_counter(), manager.call(read_thread_time())
                with full_collections_on_growth() if is_served else nullcontext(), Pauses() as pauses:
                    for result in manager.iterate(workload.tasks()):
                        check_result(result, oracle.script)
                computed_s = manager.call(read_thread_time()) - before
                gc.unfreeze()
                latency = found[is_served]
                latency.busy.append(computed_s / (time.perf_counter() - started))
                latency.add(clients.calls, skipped_s)
                latency.full += pauses.milliseconds
                latency.young = max(latency.young, pauses.longest_young)
    finally:
        clients.stop()


def compare(tokenizer: Any, cases: list[Case], rate: float, num_rounds: int) -> None:
    """Measure each case with both kinds of garbage collections, in turns, and print both."""
    found = {case: {is_served: Latency() for is_served in (False, True)} for case in cases}
    for number in range(num_rounds):
        for case in cases:
            measure_latency(tokenizer, case, rate, found[case], [False, True] if number % 2 else [True, False])
    print(f"milliseconds at about {rate:g} calls in a second, {num_rounds} rounds of both kinds in turns")
    for case, latencies in found.items():
        for is_served, latency in latencies.items():
            print(f"{case}, {'as served' if is_served else 'as Python has it'}: {latency.describe()}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1000, help="idle sessions, or 0 (default: %(default)s)")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 32, 256], help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=175.0, help="calls in a second (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="of each kind (default: %(default)s)")
    parser.add_argument("--large", type=float, default=2.0, help="MB of large bodies, or 0 (default: %(default)s)")
    options = parser.parse_args()
    configure_logging("warning")
    tokenizer = load_tokenizer(CACHE)
    print(f"{describe_machine()}, aiohttp {version('aiohttp')}")
    if options.idle:
        memory, kinds = measure_memory(tokenizer, options.idle)
        base = memory["one session"]
        print(f"resident MB of {options.idle} sessions; with one session {base:.0f}")
        for name in ("all sessions, no call", "all sessions, one call each"):
            print(f"{name:30s} +{memory[name] - base:.1f}")
        print(f"objects that a collection visits, of each session after its call: {sum(kinds.values()):.0f}")
        print(", ".join(f"{name} {number:.1f}" for name, number in kinds.most_common(12)))
    cases = [Case(at_once) for at_once in options.at_once]
    if options.large:
        cases += [Case(at_once, int(1e6 * options.large)) for at_once in options.at_once if at_once > 1]
    compare(tokenizer, cases, options.rate, options.rounds)


if __name__ == "__main__":
    main()
