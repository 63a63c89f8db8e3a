"""
A soak test on Ray: thousands of episodes with tools that hang, raise and block, and with killed replicas and workers.

    python benchmarks/soak.py [--episodes 10000] [--round 500] [--workers 3] [--replicas 3]

The expected tokens of every episode are known, so the test detects lost and repeated tokens. A call ends when 98 % of
its episodes have finished; the next call resumes the others. The test prints the counts of episodes and, for every
process that lived long enough, the resident memory and its growth in MB per 1,000 episodes: a least-squares fit after
the first fifth of the episodes, and one over the second half. It exits with 1 if an episode is missing, duplicated or
wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
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
from measurement import describe_machine

from turnwise import GenerateRequest, SamplingParams, State, Status, Task, ToolCall
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import EngineClient, Limits
from turnwise.protocols import Engine, Router
from turnwise.record.invariants import check_trajectory
from turnwise.record.result import EpisodeResult
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise_plain_functions import tool

STOP = 3
TURNS = 4
MAX_TOKENS = 24
TOOL_S = 3.0
"""Deadline of a tool call in seconds; a normal call is instant, so it meets the deadline also on a busy machine."""
FAULTS = ("hangs", "raises", "blocks")


def next_token(context: Sequence[int]) -> int:
    """Return the next id, a function of the context alone."""
    return (context[-1] * 31 + len(context) * 17 + len(context) // 3) % 41


def sample_turn(context: list[int], max_tokens: int) -> list[int]:
    """Return the turn that the model samples after a context."""
    ids = list(context)
    while len(ids) - len(context) < max_tokens:
        ids.append(next_token(ids))
        if ids[-1] == STOP:
            break
    return ids[len(context) :]


def fault_of(uid: str) -> str:
    """Return the fault of an episode's first tool call, or an empty string; each kind affects 1 % of the episodes."""
    return dict(enumerate(FAULTS)).get(int(uid) % 100, "")


def find_error(uid: str, ids: list[int], num_errors: int) -> str:
    """
    Return the error in the ids of an episode's record, or an empty string.

    The check samples every turn again from the ids before it. The observations must report exactly `num_errors` failed
    calls; on a busy machine a normal call may also miss its deadline.
    """
    expected, num_reported = list(uid.encode()), 0
    for turn in range(TURNS):
        expected += sample_turn(expected, MAX_TOKENS)
        if turn < TURNS - 1:
            failed = ids[len(expected) + 1 : len(expected) + 2] == [2]
            if turn == 0 and fault_of(uid) and not failed:
                return "its first tool call did not fail"
            num_reported += failed
            expected += [1, 2 if failed else 1]
    if ids != expected:
        return f"its {len(ids)} tokens differ from the {len(expected)} expected ones"
    return "" if num_reported == num_errors else f"{num_reported} failed calls were reported, but {num_errors} failed"


class SoakAgent:
    """Alternates turns and tool calls; an observation reports whether the call failed."""

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
        name = "wait_for_ever" if fault == "hangs" else "look"
        result = await episode.call_tool(ToolCall(name=name, arguments={"how": fault}))
        episode.observe(np.array([1, 2 if result.error else 1]))
        episode.memory["turn"] = turn + 1
        return State.GENERATING


def look(how: str) -> str:
    """
    Return, raise or block the thread.

    Args:
        how: the fault, or an empty string.
    """
    if how == "blocks":
        time.sleep(TOOL_S + 1)
    if how == "raises":
        raise ValueError("injected fault")
    return "seen"


async def wait_for_ever(how: str) -> str:
    """
    Hang.

    Args:
        how: ignored.
    """
    await asyncio.Event().wait()
    return how


@frozen
class SoakBlueprint:
    """Builds the components of every process."""

    token_latency_s: float = 0.001

    def make_engine(self) -> Engine:
        """Build a replica's engine."""
        from turnwise_testing.engines.scripted import ScriptedEngine

        def outputs(request: GenerateRequest) -> list[int]:
            return sample_turn(request.token_ids.tolist(), request.sampling.max_tokens or MAX_TOKENS)

        return ScriptedEngine(outputs, token_latency_s=self.token_latency_s, record=False)

    def make_components(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerComponents:
        """Build a worker's components."""
        tools = ToolBox([tool(look), tool(wait_for_ever)])
        limits = Limits(response_length=400, tool_call_s=TOOL_S)
        programs = {"soak": EpisodeProgram(agent=SoakAgent(), tools=tools)}
        return WorkerComponents(
            engine=engine, programs=programs, limits=limits, stop_token_ids=(STOP,), max_in_flight=128
        )

    def make_router(self) -> Router:
        """Build the default router."""
        from turnwise_routers import LeastTokens, LeastTokensConfig

        return LeastTokens(LeastTokensConfig())

    def make_judge_engine(self) -> Engine:
        """Raise `TypeError`: there is no judge."""
        raise TypeError("the soak has no judge")

    def make_reward(self, judge: EngineClient | None = None) -> None:
        """Return None: there is no reward."""

    def make_transport(self) -> Any:
        """Raise `TypeError`: there are no weight updates."""
        raise TypeError("the soak updates no weights")


@define
class Memory:
    """Resident memory of every process by name and pid, sampled over the episodes."""

    samples: dict[tuple[str, int], list[tuple[int, float]]] = field(factory=lambda: defaultdict(list))

    def sample(self, num_episodes: int) -> None:
        """Sample the memory of all processes of this run."""
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                name, megabytes = _process_name(process), process.memory_info().rss / 2**20
            except psutil.Error:
                continue
            self.samples[name, process.pid].append((num_episodes, megabytes))

    def table(self, total: int) -> Iterator[str]:
        """Yield a line for each process that lived through most of the test."""
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


def _process_name(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "driver"
    command = process.cmdline() or [process.name()]
    if command[0].startswith("ray::"):
        return command[0].split(".")[0]
    names = [part.split("/")[-1] for part in command[:4] if not part.startswith("-")]
    return (names[1] if names[0].startswith("python") and len(names) > 1 else names[0])[:24]


@define
class Killer:
    """Kills replicas and workers at intervals, except the first of each, whose memory is measured to the end."""

    runtime: RayRuntime
    every: int
    num_killed: Counter[str] = field(factory=Counter)
    _next: int = 0

    def on_episode(self, num_episodes: int) -> None:
        """Kill an actor when the interval has passed."""
        if num_episodes < self._next + self.every:
            return
        self._next = num_episodes
        kinds = {"replica": self.runtime.policy.slots[1:], "worker": self.runtime.workers.slots[1:]}
        kind = ("replica", "worker")[sum(self.num_killed.values()) % 2]
        handles = [slot.handle for slot in kinds[kind] if slot.handle is not None]
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
class Tally:
    """Counts finished episodes and their errors."""

    seen: Counter[str] = field(factory=Counter)
    statuses: Counter[str] = field(factory=Counter)
    wrong: list[str] = field(factory=list)
    num_late_calls: int = 0

    def add(self, result: EpisodeResult) -> None:
        """Check and count one episode."""
        self.seen[result.task.uid] += 1
        self.statuses[str(result.status)] += 1
        for trajectory in result.trajectories:
            check_trajectory(trajectory)
        uid, metrics = result.task.uid, result.metrics
        self.num_late_calls += metrics.num_tool_errors - bool(fault_of(uid))
        if result.status not in (Status.COMPLETED, Status.TRUNCATED):
            error = result.fault.message if result.fault else str(result.status)
        else:
            error = find_error(uid, result.trajectories[0].input_ids.tolist(), metrics.num_tool_errors)
        if error:
            self.wrong.append(f"episode {uid}: {result.status}: {error}")


def soak(total: int, per_round: int, num_workers: int, num_replicas: int) -> int:
    """Run the test, print the report and return the exit code."""
    config = RuntimeConfig(
        name="ray",
        num_workers=num_workers,
        num_replicas=num_replicas,
        ray=RayConfig(max_restarts=10**6, backoff_s=0.01, max_kills=50, window=128),
    )
    runtime = RayRuntime(SoakBlueprint(), config)
    plan = RolloutPlan(default_agent="soak", agents={"soak": None}, sampling=SamplingParams(temperature=1.0))
    tally, memory, killer = Tally(), Memory(), Killer(runtime, every=max(50, total // 40))
    message = {"role": "user", "content": "x"}
    started = time.perf_counter()
    with RolloutManager(runtime, plan) as manager:
        for step, numbers in enumerate(_batched(total, per_round)):
            tasks = [Task(messages=(message,), uid=str(number), sample_index=number) for number in numbers]
            run(manager, tally, memory, killer, (tasks, step, 0.98))
            print(f"{sum(tally.seen.values())} of {total}, {time.perf_counter() - started:.0f} s", flush=True)
        run(manager, tally, memory, killer, ([], step + 1, 1.0))
        stats = manager.stats()
    wall_s = time.perf_counter() - started
    return report(total, tally, memory, killer, {**stats, "wall_s": round(wall_s, 1)})


def run(
    manager: RolloutManager, tally: Tally, memory: Memory, killer: Killer, call: tuple[list[Task], int, float]
) -> None:
    """Run one rollout call with the unfinished episodes of earlier calls."""
    tasks, step, min_fraction = call
    if not tasks and not manager.unfinished:
        return
    results = manager.iterate(tasks, global_step=step, min_fraction=min_fraction, grace_s=0.1, resume=True)
    for result in results:
        tally.add(result)
        num_episodes = sum(tally.statuses.values())
        killer.on_episode(num_episodes)
        if num_episodes % 100 == 0:
            memory.sample(num_episodes)


def report(total: int, tally: Tally, memory: Memory, killer: Killer, stats: dict[str, float]) -> int:
    """Print the counts and the table of memory; return the exit code."""
    missing, duplicated = total - len(tally.seen), sum(n > 1 for n in tally.seen.values())
    faults = Counter(fault for number in range(total) if (fault := fault_of(str(number))))
    print(f"\nfaults      tool {dict(faults)}, killed {dict(killer.num_killed)}")
    print(f"episodes    requested {total}, missing {missing}, duplicated {duplicated}, wrong {len(tally.wrong)}")
    print(f"statuses    {dict(tally.statuses)}")
    print(f"late        {tally.num_late_calls} normal tool calls missed their deadline")
    print(f"stats       {stats}\n")
    for line in (*tally.wrong[:5], *memory.table(total)):
        print(line)
    return int(bool(missing or duplicated or tally.wrong))


def _batched(total: int, size: int) -> Iterator[range]:
    yield from (range(start, min(start + size, total)) for start in range(0, total, size))


def main() -> None:
    """Parse the command line and run the test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000, help="total episodes (default: %(default)s)")
    parser.add_argument("--round", type=int, default=500, help="episodes per call (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="workers (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=3, help="engine replicas (default: %(default)s)")
    arguments = parser.parse_args()
    print(describe_machine())
    sys.exit(soak(arguments.episodes, arguments.round, arguments.workers, arguments.replicas))


if __name__ == "__main__":
    main()
