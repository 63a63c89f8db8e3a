"""
A soak under Ray: thousands of episodes, among which tools hang, raise and block, and replicas and workers are killed.

    python benchmarks/soak.py [--episodes 10000] [--round 500] [--workers 3] [--replicas 3]

What every episode must contain is known beforehand, so that a token that was lost or came twice shows. Calls end when
0.98 of their episodes have finished; the others go on in the next one. Printed are the accounts and, of every process
that lived long enough, resident memory and its slope in MB per 1,000 episodes, fitted by least squares behind the first
fifth, and over the second half. Exits with 1 when an episode is missing, doubled or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
from attrs import define, field, frozen

from turnwise import GenerateRequest, SamplingParams, State, Status, Task, ToolCall
from turnwise.config_runtime import RayConfig, RuntimeConfig
from turnwise.driver import Recipe
from turnwise.episode_setup import EngineClient, Limits
from turnwise.function_tool import function_tool
from turnwise.invariants import check_trajectory
from turnwise.protocols import Engine, Router
from turnwise.result import EpisodeResult
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime
from turnwise.runtime.worker import WorkerParts
from turnwise.tools import ToolBox

STOP = 3
TURNS = 4
MAX_TOKENS = 24
TOOL_S = 3.0
"""Seconds that a tool call may take; an ordinary one takes none, so that a loaded machine makes no fault of its own."""
FAULTS = ("hangs", "raises", "blocks")


def next_token(context: Sequence[int]) -> int:
    """Return the next id of a model that depends on the context alone."""
    return (context[-1] * 31 + len(context) * 17 + len(context) // 3) % 41


def turn_after(context: list[int], max_tokens: int) -> list[int]:
    """Return what the model says behind a context."""
    grown = list(context)
    while len(grown) - len(context) < max_tokens:
        grown.append(next_token(grown))
        if grown[-1] == STOP:
            break
    return grown[len(context) :]


def fault_of(uid: str) -> str:
    """Return what goes wrong with the first tool call of an episode, if anything: 1 % of each kind."""
    return dict(enumerate(FAULTS)).get(int(uid) % 100, "")


def complaint_about(uid: str, ids: list[int], num_errors: int) -> str:
    """
    Return what is wrong with the ids of an episode's record, if anything.

    Every turn is sampled again from what stands before it. What was observed may say that a call failed as often as
    calls did: on a loaded machine an ordinary one can miss its deadline too.
    """
    expected, told = list(uid.encode()), 0
    for turn in range(TURNS):
        expected += turn_after(expected, MAX_TOKENS)
        if turn < TURNS - 1:
            failed = ids[len(expected) + 1 : len(expected) + 2] == [2]
            if turn == 0 and fault_of(uid) and not failed:
                return "its first tool call did not fail"
            told += failed
            expected += [1, 2 if failed else 1]
    if ids != expected:
        return f"has {len(ids)} tokens that are not the {len(expected)} it must have"
    return "" if told == num_errors else f"was told of {told} failed calls, but {num_errors} failed"


class SoakAgent:
    """Turns with a tool call between them; what is observed says whether the call failed."""

    async def step(self, episode: Any) -> str:
        """Make one transition."""
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), np.uint8))
            episode.memory["turn"] = 0
            return State.GENERATING
        turn = episode.memory["turn"]
        if episode.state == State.GENERATING:
            await episode.generate(max_tokens=MAX_TOKENS)
            return State.TERMINATED if turn == TURNS - 1 else State.PROCESSING_TOOLS
        fault = fault_of(episode.task.uid) if turn == 0 else ""
        tool = "wait_for_ever" if fault == "hangs" else "look"
        result = await episode.call_tool(ToolCall(name=tool, arguments={"how": fault}))
        episode.observe(np.array([1, 2 if result.error else 1]))
        episode.memory["turn"] = turn + 1
        return State.GENERATING


def look(how: str) -> str:
    """
    Answer, raise or block the thread, as asked.

    Args:
        how: what goes wrong.
    """
    if how == "blocks":
        time.sleep(TOOL_S + 1)
    if how == "raises":
        raise ValueError("as asked")
    return "seen"


async def wait_for_ever(how: str) -> str:
    """
    Hang.

    Args:
        how: nothing.
    """
    await asyncio.Event().wait()
    return how


@frozen
class SoakBlueprint:
    """What every process builds its parts from."""

    token_latency_s: float = 0.001

    def make_engine(self) -> Engine:
        """Build a replica's engine."""
        from turnwise.testing.scripted import ScriptedEngine

        def outputs(request: GenerateRequest) -> list[int]:
            return turn_after(request.token_ids.tolist(), request.sampling.max_tokens or MAX_TOKENS)

        return ScriptedEngine(outputs, token_latency_s=self.token_latency_s, record=False)

    def make_parts(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerParts:
        """Build a worker's parts."""
        tools = ToolBox([function_tool(look), function_tool(wait_for_ever)])
        limits = Limits(response_length=400, tool_call_s=TOOL_S)
        recipes = {"soak": Recipe(agent=SoakAgent(), tools=tools)}
        return WorkerParts(engine=engine, recipes=recipes, limits=limits, stop_token_ids=(STOP,), max_in_flight=128)

    def make_router(self) -> Router:
        """Build the default router."""
        from turnwise.routing import LeastTokens, LeastTokensConfig

        return LeastTokens(LeastTokensConfig())

    def make_judge_engine(self) -> Engine:
        """Refuse: there is no judge."""
        raise TypeError("the soak has no judge")

    def make_reward(self, judge: EngineClient | None = None) -> None:
        """Return none."""

    def make_transport(self) -> Any:
        """Refuse: there are no weights."""
        raise TypeError("the soak updates no weights")


@define
class Memory:
    """Resident memory of every process, by what it is and its id, over the episodes."""

    samples: dict[tuple[str, int], list[tuple[int, float]]] = field(factory=lambda: defaultdict(list))

    def sample(self, num_episodes: int) -> None:
        """Look at all processes of this run once."""
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                name, megabytes = _name_of(process), process.memory_info().rss / 2**20
            except psutil.Error:
                continue
            self.samples[name, process.pid].append((num_episodes, megabytes))

    def table(self, total: int) -> Iterator[str]:
        """Yield a line for each process that lived through most of the soak."""
        columns = (("samples", 7), ("first MB", 9), ("last MB", 9), ("max MB", 9), ("MB / 1,000", 10), ("2nd half", 10))
        yield f"{'process':34s} " + " ".join(f"{name:>{width}s}" for name, width in columns)
        for (name, pid), samples in sorted(self.samples.items()):
            settled = [sample for sample in samples if sample[0] >= total / 5]
            if len(settled) < 5 or settled[-1][0] - settled[0][0] < total / 2:
                continue
            at, megabytes = np.array(settled).T
            slopes = [np.polyfit(at[i:] / 1000, megabytes[i:], 1)[0] for i in (0, int(np.searchsorted(at, total / 2)))]
            figures = (samples[0][1], megabytes[-1], megabytes.max())
            shown = " ".join([*(f"{each:9.1f}" for each in figures), *(f"{each:10.3f}" for each in slopes)])
            yield f"{f'{name} ({pid})':34s} {len(samples):7d} {shown}"


def _name_of(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "driver"
    command = process.cmdline() or [process.name()]
    if command[0].startswith("ray::"):
        return command[0].split(".")[0]
    names = [part.split("/")[-1] for part in command[:4] if not part.startswith("-")]
    return (names[1] if names[0].startswith("python") and len(names) > 1 else names[0])[:24]


@define
class Killer:
    """Kills a replica and a worker now and then, but never the first of each: their memory is watched to the end."""

    runtime: RayRuntime
    every: int
    num_killed: Counter[str] = field(factory=Counter)
    _next: int = 0

    def after(self, num_episodes: int) -> None:
        """Kill when it is time."""
        if num_episodes < self._next + self.every:
            return
        self._next = num_episodes
        kinds = {"replica": self.runtime.policy.seats[1:], "worker": self.runtime.workers.seats[1:]}
        kind = ("replica", "worker")[sum(self.num_killed.values()) % 2]
        handles = [seat.handle for seat in kinds[kind] if seat.handle is not None]
        if handles:
            self._kill(kind, random.choice(handles))

    def _kill(self, kind: str, handle: Any) -> None:
        import ray

        try:
            pid = int(ray.get(handle.stats.remote(), timeout=5)["pid"])
        except (ray.exceptions.RayError, TimeoutError):
            return
        os.kill(pid, signal.SIGKILL)
        self.num_killed[kind] += 1


@define
class Accounts:
    """What came back, and what was wrong with it."""

    seen: Counter[str] = field(factory=Counter)
    statuses: Counter[str] = field(factory=Counter)
    wrong: list[str] = field(factory=list)
    num_late_calls: int = 0

    def take(self, result: EpisodeResult) -> None:
        """Check one episode."""
        self.seen[result.task.uid] += 1
        self.statuses[str(result.status)] += 1
        for trajectory in result.trajectories:
            check_trajectory(trajectory)
        uid, metrics = result.task.uid, result.metrics
        self.num_late_calls += metrics.num_tool_errors - bool(fault_of(uid))
        if result.status not in (Status.COMPLETED, Status.TRUNCATED):
            why = result.fault.message if result.fault else str(result.status)
        else:
            why = complaint_about(uid, result.trajectories[0].input_ids.tolist(), metrics.num_tool_errors)
        if why:
            self.wrong.append(f"episode {uid}: {result.status}: {why}")


def soak(total: int, per_round: int, num_workers: int, num_replicas: int) -> int:
    """Run it, print what came of it, and return the exit code."""
    config = RuntimeConfig(
        name="ray",
        num_workers=num_workers,
        num_replicas=num_replicas,
        ray=RayConfig(max_restarts=10**6, backoff_s=0.01, max_kills=50, window=128),
    )
    runtime = RayRuntime(SoakBlueprint(), config)
    plan = RolloutPlan(default_agent="soak", agent_names=frozenset({"soak"}), sampling=SamplingParams(temperature=1.0))
    accounts, memory, killer = Accounts(), Memory(), Killer(runtime, every=max(50, total // 40))
    message = {"role": "user", "content": "x"}
    started = time.perf_counter()
    with RolloutManager(runtime, plan) as manager:
        for step, numbers in enumerate(_batched(total, per_round)):
            tasks = [Task(messages=(message,), uid=str(number), sample_index=number) for number in numbers]
            run(manager, accounts, memory, killer, (tasks, step, 0.98))
            print(f"{sum(accounts.seen.values())} of {total}, {time.perf_counter() - started:.0f} s", flush=True)
        run(manager, accounts, memory, killer, ([], step + 1, 1.0))
        stats = manager.stats()
    wall_s = time.perf_counter() - started
    return report(total, accounts, memory, killer, {**stats, "wall_s": round(wall_s, 1)})


def run(
    manager: RolloutManager, accounts: Accounts, memory: Memory, killer: Killer, call: tuple[list[Task], int, float]
) -> None:
    """Make one call, with what the calls before left."""
    tasks, step, min_fraction = call
    if not tasks and not manager.unfinished:
        return
    results = manager.iterate(tasks, global_step=step, min_fraction=min_fraction, grace_s=0.1, resume=True)
    for result in results:
        accounts.take(result)
        num_episodes = sum(accounts.statuses.values())
        killer.after(num_episodes)
        if num_episodes % 100 == 0:
            memory.sample(num_episodes)


def report(total: int, accounts: Accounts, memory: Memory, killer: Killer, stats: dict[str, float]) -> int:
    """Print the accounts and the table of memory, and return the exit code."""
    missing, doubled = total - len(accounts.seen), sum(n > 1 for n in accounts.seen.values())
    faults = Counter(fault for number in range(total) if (fault := fault_of(str(number))))
    print(f"\nfaults      tool {dict(faults)}, killed {dict(killer.num_killed)}")
    print(f"episodes    asked for {total}, missing {missing}, doubled {doubled}, wrong {len(accounts.wrong)}")
    print(f"statuses    {dict(accounts.statuses)}")
    print(f"late        {accounts.num_late_calls} ordinary tool calls missed their deadline")
    print(f"stats       {stats}\n")
    for line in (*accounts.wrong[:5], *memory.table(total)):
        print(line)
    return int(bool(missing or doubled or accounts.wrong))


def _batched(total: int, size: int) -> Iterator[range]:
    yield from (range(start, min(start + size, total)) for start in range(0, total, size))


def main() -> None:
    """Parse the command line and soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--round", type=int, default=500, help="episodes of one call")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    sys.exit(soak(arguments.episodes, arguments.round, arguments.workers, arguments.replicas))


if __name__ == "__main__":
    main()
