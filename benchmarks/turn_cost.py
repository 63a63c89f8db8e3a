"""
What a turn costs around the engine: the local runtime next to a bare asyncio loop, in one process and one run.

    python benchmarks/turn_cost.py [--runs 7] [--episodes 256] [--json FILE]

The engine answers at once, so what is measured is the cost of everything else: template, tokens, records, parsing,
routing, checks. CPU seconds are of the whole process; the two sides take turns, so that other work on the machine falls
on both. Every trajectory is compared with the script before its time counts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare_loop
import numpy as np
from attrs import define, frozen
from workload import Oracle, Workload, heavy_tail, schemas, tokenizer_of, uniform

from turnwise import (
    Capabilities,
    EpisodeResult,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Resources,
    Status,
    Task,
    Tool,
    ToolResult,
)
from turnwise.chat import ChatTemplate
from turnwise.driver import Recipe
from turnwise.episode_setup import EngineClient, Limits
from turnwise.host import load
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerParts
from turnwise.tools import ToolBox

CACHE = Path(__file__).parent / ".cache" / "tokenizer"


@frozen
class OracleEngine:
    """An engine that knows the script."""

    oracle: Oracle
    seconds_per_token: float
    capabilities = Capabilities()

    async def start(self) -> None:
        """Nothing to start."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer with the turn that the script has for this context."""
        ids, logprobs = self.oracle.answer(request.token_ids)
        if self.seconds_per_token:
            await asyncio.sleep(self.seconds_per_token * len(ids))
        return GenerateResult(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)

    async def abort(self, request_id: str) -> None:
        """Nothing to abort."""

    async def stop(self) -> None:
        """Nothing to stop."""


@frozen
class LookupTool:
    """The tool of the workload; the others of a long schema are this one under another name."""

    workload: Workload
    schema: dict[str, Any]

    async def create(self, task: Task) -> None:
        """No session."""

    async def execute(self, session: object, arguments: dict[str, Any]) -> ToolResult:
        """Answer after the latency that the call asks for."""
        if arguments["ms"]:
            await asyncio.sleep(arguments["ms"] / 1e3)
        return ToolResult(text=self.workload.reply(arguments["key"]))

    async def release(self, session: object) -> None:
        """No session."""


def parts_for(
    workload: Workload, engine: EngineClient, tokenizer: Any, tools: list[dict[str, Any]], response_length: int
) -> WorkerParts:
    """Return a worker's parts: the tool agent with the workload's tool."""
    host = load()
    boxed: dict[str, Tool] = {schema["function"]["name"]: LookupTool(workload, schema) for schema in tools}
    chat = ChatTemplate(tokenizer)
    parser = host.build("tool_parsers", "hermes", {}, Resources(chat=chat))
    resources = Resources(chat=chat, parser=parser, tools=boxed)
    options = {"max_assistant_turns": 128, "max_user_turns": 128}
    agent = host.build("agents", "tool_agent", options, resources)
    return WorkerParts(
        engine=engine,
        recipes={"tool_agent": Recipe(agent=agent, tools=ToolBox(boxed))},
        limits=Limits(prompt_length=100_000, response_length=response_length),
        stop_token_ids=chat.stop_token_ids,
        max_in_flight=max(1, len(workload.episodes)),
    )


def manager_for(
    workload: Workload, oracle: Oracle, tokenizer: Any, tools: list[dict[str, Any]], response_length: int
) -> RolloutManager:
    """Return the local runtime with the tool agent, on the scripted engine."""
    engine = OracleEngine(oracle, workload.seconds_per_token)
    parts = parts_for(workload, engine, tokenizer, tools, response_length)
    plan = RolloutPlan(default_agent="tool_agent", agent_names=frozenset({"tool_agent"}))
    return RolloutManager(LocalRuntime(engine, parts), plan)


def refuse_wrong(result: EpisodeResult, script: list[list[list[int]]]) -> None:
    """Raise when a trajectory is not exactly what the script says."""
    turns = script[result.task.sample_index]
    (trajectory,) = result.trajectories
    sampled = trajectory.response_ids[trajectory.response_mask == 1]
    if result.status is not Status.COMPLETED or not np.array_equal(sampled, np.concatenate(turns)):
        raise AssertionError(f"episode {result.uid}: {result.status} {result.fault}")
    if len(trajectory.turns()) != len(turns):
        raise AssertionError(f"episode {result.uid}: {len(trajectory.turns())} turns, expected {len(turns)}")


@define
class Case:
    """One row of the table: a workload, prepared for both sides."""

    name: str
    workload: Workload
    num_tools: int
    response_length: int

    def measure(self, tokenizer: Any, runs: int) -> dict[str, Any]:
        """Return CPU milliseconds a turn of both sides, run by run."""
        oracle = Oracle.of(self.workload, tokenizer)
        tools = schemas(self.num_tools)
        tasks = [
            Task(messages=tuple(self.workload.messages(number)), uid=str(number), sample_index=number)
            for number in range(len(self.workload.episodes))
        ]
        bare, ours, walls = [], [], []
        with manager_for(self.workload, oracle, tokenizer, tools, self.response_length) as manager:
            for index in range(runs + 1):  # the first is a warm-up
                coroutine = bare_loop.run(self.workload, oracle, tokenizer, tools, self.response_length)
                bare_ms, _, _ = self._timed(lambda c=coroutine: asyncio.run(c))
                our_ms, wall_s, results = self._timed(lambda: manager.rollout(tasks))
                for result in results:
                    refuse_wrong(result, oracle.script)
                if index:
                    bare.append(bare_ms)
                    ours.append(our_ms)
                    walls.append(wall_s)
        ratios = [mine / base for mine, base in zip(ours, bare, strict=True)]
        return {"case": self.name, "bare_ms": bare, "turnwise_ms": ours, "ratio": ratios, "wall_s": walls}

    def _timed(self, run: Callable[[], Any]) -> tuple[float, float, Any]:
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        answer = run()
        cpu_ms = 1e3 * (time.process_time() - cpu) / self.workload.num_turns
        return cpu_ms, time.perf_counter() - wall, answer


def cases(episodes: int) -> list[Case]:
    """Return the rows of the table."""
    rows = [Case(f"{episodes} episodes, 4 turns, {tools} tools", uniform(episodes), tools, 4096) for tools in (1, 40)]
    for turns in (8, 16, 32, 64):
        workload = uniform(max(1, episodes * 4 // turns), turns=turns)
        rows.append(Case(f"{len(workload.episodes)} episodes, {turns} turns, 1 tool", workload, 1, 400 * turns))
    return rows


def report(row: dict[str, Any]) -> str:
    """Return one line: median, min and max of both sides and of the ratio."""
    cells = []
    for key in ("bare_ms", "turnwise_ms", "ratio"):
        values = row[key]
        cells.append(f"{statistics.median(values):6.3f} ({min(values):.3f}-{max(values):.3f})")
    return f"{row['case']:34s} " + "  ".join(cells)


def makespans(tokenizer: Any, runs: int) -> list[str]:
    """Return lines of makespan over the longest critical path, under heavy-tailed tool latency."""
    lines = []
    for seconds_per_token, median_s in ((0.002, 0.2), (0.0005, 0.05)):
        workload = heavy_tail(256, median_s=median_s, seconds_per_token=seconds_per_token)
        walls = Case("", workload, 1, 4096).measure(tokenizer, runs)["wall_s"]
        ratios = [wall / workload.critical_path_s() for wall in walls]
        lines.append(
            f"{seconds_per_token * 1e3:g} ms a token, {median_s:g} s median tool: "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        )
    return lines


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="measured runs of each case, after one warm-up")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--latency", action="store_true", help="also the makespan under heavy-tailed tool latency")
    parser.add_argument("--json", type=Path, help="write every run's figures to this file")
    arguments = parser.parse_args()
    tokenizer = tokenizer_of(CACHE)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"CPU milliseconds a turn, whole process; median (min-max) of {arguments.runs} runs")
    print(f"{'':34s} {'bare loop':20s}  {'turnwise':20s}  ratio")
    rows = []
    for case in cases(arguments.episodes):
        rows.append(case.measure(tokenizer, arguments.runs))
        print(report(rows[-1]), flush=True)
    if arguments.latency:
        print("makespan over the longest critical path, 256 episodes:")
        print("\n".join(makespans(tokenizer, arguments.runs)))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
