"""
Measures the CPU cost of a call of an outside agent, relative to a turn of `tool_agent` in the same process.

    python benchmarks/gateway_cost.py [--runs 5] [--turns 4 16 64 128]

Both variants run the same episodes with an engine that answers at once. The outside agents are one other process, which
speaks Chat Completions over HTTP; its CPU time is not counted. The figures are CPU milliseconds per turn of the whole
process with driver and gateway. Every trajectory is compared with the workload's script.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from attrs import define, evolve, field
from measurement import describe_machine, format_spread
from turn_cost import CACHE, PLAN, OracleEngine, build_components, check_result
from workload import LOOKUP_SCHEMA, Oracle, Workload, load_tokenizer, uniform

from turnwise import EpisodeResult, Resources, Task
from turnwise.chat.template import ChatTemplate
from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.episode.driver import EpisodeProgram
from turnwise.events.logging import configure_logging
from turnwise.plugin.host import load
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager

TURNS_PER_RUN = 512
AT_ONCE = 32
"""Conversations at once; more of them would measure the client's queue."""


@define
class Clients:
    """The process of the agents: takes tasks with addresses, and says which have ended."""

    process: subprocess.Popen[str]
    _ended: dict[str, asyncio.Future[None]] = field(factory=dict)
    _reading: asyncio.Future[None] | None = None

    @classmethod
    def start(cls, reply_chars: int) -> Clients:
        """Start the process."""
        command = [sys.executable, __file__, "--clients", str(reply_chars)]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))

    async def solve(self, task: Task, client: Any) -> None:
        """Let the process hold the conversation of a task; the function of the agent `external`."""
        loop = asyncio.get_running_loop()
        if self._reading is None:
            self._reading = loop.run_in_executor(None, self._read, loop)
        ended = self._ended[task.uid] = loop.create_future()
        assert self.process.stdin is not None
        job = {"uid": task.uid, "messages": task.messages, "url": client.openai_base_url, "key": client.api_key}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        await ended

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            loop.call_soon_threadsafe(self._ended.pop(line.strip()).set_result, None)


CLIENTS: list[Clients] = []
"""The process of the current measurement; the agent's function finds it here."""


async def solve(task: Task, client: Any) -> None:
    """Solve one task in the process of the agents."""
    await CLIENTS[-1].solve(task, client)


async def converse(job: dict[str, Any], workload: Workload, session: Any) -> None:
    """Hold one conversation, as an agent with one tool does."""
    messages = list(job["messages"])
    headers = {"Authorization": f"Bearer {job['key']}"}
    while True:
        body = {"model": "policy", "messages": messages, "tools": [LOOKUP_SCHEMA]}
        async with session.post(f"{job['url']}/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            message = (await response.json())["choices"][0]["message"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            break
        for call in calls:
            text = workload.reply(json.loads(call["function"]["arguments"])["key"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    print(job["uid"], flush=True)


async def run_clients(reply_chars: int) -> None:
    """Hold the conversations of the jobs on standard input until it ends."""
    import aiohttp

    loop, workload = asyncio.get_running_loop(), Workload((), reply_chars=reply_chars)
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            group.create_task(converse(json.loads(line), workload, session))


def build_manager(workload: Workload, oracle: Oracle, tokenizer: Any, length: int, *, outside: bool) -> RolloutManager:
    """Build a manager whose agent is `tool_agent`, or `external` with the process of the agents."""
    engine = OracleEngine(oracle, 0.0)
    parts = build_components(workload, engine, tokenizer, [LOOKUP_SCHEMA], length)
    parts = evolve(parts, max_in_flight=AT_ONCE)
    if outside:
        host, chat = load(), ChatTemplate(tokenizer)
        parser = build_part(host, "tool_parsers", "hermes", Resources(chat=chat))
        options = {"function": f"{Path(__file__).stem}:solve", "max_calls": 1000}
        external = build_part(host, "agents", Choice("external", options), Resources(chat=chat, parser=parser))
        parts = evolve(parts, programs={"tool_agent": EpisodeProgram(agent=external)})
    return RolloutManager(LocalRuntime(engine, parts), PLAN)


def measure(manager: RolloutManager, tasks: list[Task], oracle: Oracle) -> tuple[float, list[EpisodeResult]]:
    """Return the CPU milliseconds per turn of a run, and its episodes; `AssertionError` for a wrong trajectory."""
    gc.collect()
    cpu = time.process_time()
    results = manager.rollout(tasks)
    cpu_ms = 1e3 * (time.process_time() - cpu) / sum(map(len, oracle.script))
    for result in results:
        check_result(result, oracle.script)
    return cpu_ms, results


def measure_case(tokenizer: Any, turns: int, runs: int) -> tuple[int, dict[str, list[float]]]:
    """Return the bytes of the last request, and CPU milliseconds per turn of both variants and their difference."""
    workload = uniform(max(4, TURNS_PER_RUN // turns), turns=turns, tokens=100, reply_chars=800)
    oracle, tasks = Oracle.of(workload, tokenizer), workload.tasks()
    length = 1200 * turns
    found: dict[str, list[float]] = {"tool_agent": [], "external": [], "added": [], "ratio": []}
    clients = Clients.start(workload.reply_chars)
    CLIENTS.append(clients)
    try:
        with (
            build_manager(workload, oracle, tokenizer, length, outside=False) as inside,
            build_manager(workload, oracle, tokenizer, length, outside=True) as outside,
        ):
            for index in range(runs + 1):  # the first is a warm-up
                mine, _ = measure(inside, tasks, oracle)
                theirs, results = measure(outside, tasks, oracle)
                if index:
                    for name, value in zip(found, (mine, theirs, theirs - mine, theirs / mine), strict=True):
                        found[name].append(value)
    finally:
        assert clients.process.stdin is not None
        clients.process.stdin.close()
        clients.process.wait()
    (trajectory,) = results[0].trajectories
    return len(tokenizer.decode(trajectory.input_ids).encode()), found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs per case (default: %(default)s)")
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16, 64, 128], help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients is not None:
        asyncio.run(run_clients(options.clients))
        return
    # The agent's function is looked up by the name of this module, which runs as `__main__`.
    sys.modules[Path(__file__).stem] = sys.modules["__main__"]
    configure_logging("warning")  # as a run does: a line per call at `debug` costs nothing then
    tokenizer = load_tokenizer(CACHE)
    print(describe_machine())
    print(f"CPU milliseconds per turn, process of driver and gateway; median (min-max) of {options.runs} runs")
    print(f"{'':22s} {'tool_agent':22s} {'external over HTTP':22s} {'added':22s} ratio")
    for turns in options.turns:
        num_bytes, found = measure_case(tokenizer, turns, options.runs)
        name = f"{turns} turns, {num_bytes / 1024:.0f} KB"
        print(f"{name:22s} " + " ".join(f"{format_spread(values):22s}" for values in found.values()), flush=True)


if __name__ == "__main__":
    main()
