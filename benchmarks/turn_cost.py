"""
Measures the CPU cost per turn of the local runtime relative to a plain asyncio loop, in one process.

    python benchmarks/turn_cost.py [--runs 7] [--episodes 256] [--wrappers] [--json FILE]

The engine answers at once, and its processor seconds are taken out of both variants. So the measurement covers
everything else: template, tokens, records, parsing, routing and checks. CPU seconds cover the whole process. Both
variants alternate, so other load on the machine affects both.
Every trajectory is compared with the workload's script.

`--wrappers` also compares, in alternating runs, a run without wrappers, although plugins that wrap parts are installed;
with three wrappers that pass on every call of the engine, the parser, the agent, the tools and the reward; and with the
three shipped middlewares.

`--once` runs turnwise alone, for a counter of instructions. The difference between two numbers of episodes is free of
the start of the process:

    valgrind --tool=callgrind python benchmarks/turn_cost.py --once 16 [--with none|three|middleware]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, get_args

import bare_loop
import numpy as np
from attrs import define, frozen
from measurement import describe_machine, format_spread
from workload import Oracle, Workload, heavy_tail, load_tokenizer, schemas, uniform

from turnwise import (
    Capabilities,
    Episode,
    EpisodeResult,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Resources,
    RunInfo,
    Status,
    Task,
    Tool,
    ToolResult,
    Wrapper,
)
from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import EngineClient, Limits
from turnwise.plugin.host import Host, load
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise_chat_templates.template import ChatTemplate

CACHE = Path(__file__).parent / ".cache" / "tokenizer"
Wrap = Callable[[str, Any], Any]
Wrappers = Literal["none", "three", "middleware"]
"""Wrappers of a run; a run without the choice has no reward either."""
PLAN = RolloutPlan(default_agent="tool_agent", agents={"tool_agent": None})


@frozen
class OracleEngine:
    """An engine that returns the workload's turns."""

    oracle: Oracle
    seconds_per_token: float
    capabilities = Capabilities()

    async def start(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the workload's turn for this context."""
        ids, logprobs = self.oracle.answer(request.token_ids)
        if self.seconds_per_token:
            await asyncio.sleep(self.seconds_per_token * len(ids))
        return GenerateResult(token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP)

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""


@frozen
class LookupTool:
    """The workload's tool; unused schemas share this implementation."""

    workload: Workload
    schema: dict[str, Any]

    async def create(self, task: Task) -> None:
        """Do nothing: the tool has no session."""

    async def execute(self, session: object, arguments: dict[str, Any]) -> ToolResult:
        """Return the workload's reply after the latency in the arguments."""
        if arguments["ms"]:
            await asyncio.sleep(arguments["ms"] / 1e3)
        return ToolResult(text=self.workload.reply(arguments["key"]))

    async def release(self, session: object) -> None:
        """Do nothing: the tool has no session."""


class ConstantReward:
    """Scores every episode with 1."""

    async def score(self, episode: Episode) -> float:
        """Return 1."""
        return 1.0


class Passing(Wrapper[Any]):
    """A wrapper whose methods call those of the part inside."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample a turn."""
        return await self.inner.generate(request)

    def parse(self, token_ids: Any) -> Any:
        """Parse a turn."""
        return self.inner.parse(token_ids)

    async def step(self, episode: Episode) -> Any:
        """Make a step."""
        return await self.inner.step(episode)

    async def execute(self, session: object, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool."""
        return await self.inner.execute(session, arguments)

    async def score(self, episode: Episode) -> Any:
        """Score an episode."""
        return await self.inner.score(episode)


def wrap_thrice(_kind: str, part: Any) -> Any:
    """Return a part inside of three wrappers."""
    return Passing(Passing(Passing(part)))


def shipped_middleware(host: Host, chat: ChatTemplate) -> Wrap:
    """Return the hooks of the three shipped middlewares, with options that change nothing in this workload."""
    options = {"redact_secrets": {}, "tool_rate": {"max_calls": 1_000_000}, "shape_reward": {}}
    section = tuple(build_part(host, "middleware", Choice(*each), Resources()) for each in options.items())
    run = RunInfo(config={}, role="driver", section=section, resources=Resources(chat=chat))

    def wrap(kind: str, part: Any) -> Any:
        return host.wrapping.wrap("middleware", kind, part, object, run)

    return wrap


def build_components(
    workload: Workload,
    engine: EngineClient,
    tokenizer: Any,
    tools: list[dict[str, Any]],
    response_length: int,
    wrappers: Wrappers | None = None,
) -> WorkerComponents:
    """Build a worker's components: the tool agent with the workload's tool; unless None, also with a reward."""
    host, chat = load(), ChatTemplate(tokenizer)
    choices: dict[str | None, Wrap] = {"three": wrap_thrice, "middleware": shipped_middleware(host, chat)}
    wrapped = choices.get(wrappers, lambda _kind, part: part)
    lookup_tools: dict[str, Tool] = {schema["function"]["name"]: LookupTool(workload, schema) for schema in tools}
    lookup_tools = {name: wrapped("tools", tool) for name, tool in lookup_tools.items()}
    parser = wrapped("tool_parsers", build_part(host, "tool_parsers", "hermes", Resources(chat=chat)))
    resources = Resources(chat=chat, parser=parser, tools=lookup_tools)
    options = {"max_assistant_turns": 128, "max_user_turns": 128}
    agent = wrapped("agents", build_part(host, "agents", Choice("tool_agent", options), resources))
    reward = None if wrappers is None else wrapped("rewards", ConstantReward())
    return WorkerComponents(
        engine=wrapped("engines", engine),
        programs={"tool_agent": EpisodeProgram(agent=agent, reward=reward, tools=ToolBox(lookup_tools))},
        limits=Limits(prompt_length=100_000, response_length=response_length),
        stop_token_ids=chat.stop_token_ids,
        max_in_flight=max(1, len(workload.episodes)),
    )


def build_manager(
    workload: Workload,
    oracle: Oracle,
    tokenizer: Any,
    tools: list[dict[str, Any]],
    response_length: int,
    wrappers: Wrappers | None = None,
) -> RolloutManager:
    """Build a rollout manager with the local runtime and the scripted engine."""
    engine = OracleEngine(oracle, workload.seconds_per_token)
    components = build_components(workload, engine, tokenizer, tools, response_length, wrappers)
    return RolloutManager(LocalRuntime(engine, components), PLAN)


def check_result(result: EpisodeResult, script: list[list[list[int]]]) -> None:
    """Raise `AssertionError` if a trajectory differs from the script."""
    turns = script[result.task.sample_index]
    (trajectory,) = result.trajectories
    sampled = trajectory.response_ids[trajectory.response_mask == 1]
    if result.status is not Status.COMPLETED or not np.array_equal(sampled, np.concatenate(turns)):
        raise AssertionError(f"episode {result.uid}: {result.status} {result.fault}")
    if len(trajectory.turns()) != len(turns):
        raise AssertionError(f"episode {result.uid}: {len(trajectory.turns())} turns, expected {len(turns)}")


@define
class Case:
    """One row of the table: a workload for both variants."""

    name: str
    workload: Workload
    num_tools: int
    response_length: int
    wrappers: Wrappers | None = None

    def measure(self, tokenizer: Any, runs: int) -> dict[str, Any]:
        """Return CPU milliseconds per turn of both variants for each run."""
        oracle = Oracle.of(self.workload, tokenizer)
        tools = schemas(self.num_tools)
        tasks = self.workload.tasks()
        bare, ours, walls = [], [], []
        with self.manager(oracle, tokenizer) as manager:
            for index in range(runs + 1):  # the first is a warm-up
                coroutine = bare_loop.run(self.workload, oracle, tokenizer, tools, self.response_length)
                bare_ms, _, _ = self.take(lambda c=coroutine: asyncio.run(c), oracle)
                our_ms, wall_s, results = self.take(lambda: manager.rollout(tasks), oracle)
                for result in results:
                    check_result(result, oracle.script)
                if index:
                    bare.append(bare_ms)
                    ours.append(our_ms)
                    walls.append(wall_s)
        ratios = [mine / base for mine, base in zip(ours, bare, strict=True)]
        return {"case": self.name, "bare_ms": bare, "turnwise_ms": ours, "ratio": ratios, "wall_s": walls}

    def run_once(self, tokenizer: Any) -> None:
        """Run turnwise alone, once."""
        oracle = Oracle.of(self.workload, tokenizer)
        with self.manager(oracle, tokenizer) as manager:
            for result in manager.rollout(self.workload.tasks()):
                check_result(result, oracle.script)

    def manager(self, oracle: Oracle, tokenizer: Any) -> RolloutManager:
        """Return a manager of turnwise for the workload, whose turns the oracle knows."""
        tools = schemas(self.num_tools)
        return build_manager(self.workload, oracle, tokenizer, tools, self.response_length, self.wrappers)

    def take(self, run: Callable[[], Any], oracle: Oracle) -> tuple[float, float, Any]:
        """Return CPU milliseconds per turn without those of the engine, seconds and the result of a run."""
        gc.collect()
        oracle.seconds[0] = 0.0
        cpu, wall = time.process_time(), time.perf_counter()
        result = run()
        cpu_ms = 1e3 * (time.process_time() - cpu - oracle.seconds[0]) / self.workload.num_turns
        return cpu_ms, time.perf_counter() - wall, result


def build_cases(episodes: int) -> list[Case]:
    """Build the rows of the table."""
    rows = [Case(f"{episodes} episodes, 4 turns, {tools} tools", uniform(episodes), tools, 4096) for tools in (1, 40)]
    for turns in (8, 16, 32, 64):
        workload = uniform(max(1, episodes * 4 // turns), turns=turns)
        rows.append(Case(f"{len(workload.episodes)} episodes, {turns} turns, 1 tool", workload, 1, 400 * turns))
    return rows


def format_row(row: dict[str, Any]) -> str:
    """Return one line with the spreads of both variants and of their ratio."""
    cells = [f"{format_spread(row[key]):20s}" for key in ("bare_ms", "turnwise_ms", "ratio")]
    return f"{row['case']:34s} " + "  ".join(cells)


def measure_makespans(tokenizer: Any, runs: int) -> list[str]:
    """Return lines with makespan relative to the critical path, for heavy-tailed tool latencies."""
    lines = []
    for seconds_per_token, median_s in ((0.002, 0.2), (0.0005, 0.05)):
        workload = heavy_tail(256, median_s=median_s, seconds_per_token=seconds_per_token)
        walls = Case("", workload, 1, 4096).measure(tokenizer, runs)["wall_s"]
        ratios = [wall / workload.critical_path_s() for wall in walls]
        lines.append(
            f"{seconds_per_token * 1e3:g} ms per token, {median_s:g} s median tool time: {format_spread(ratios)}"
        )
    return lines


def measure_wrappers(tokenizer: Any, runs: int, episodes: int) -> list[str]:
    """Return lines with the CPU time per turn of each choice of wrappers, relative to none; the runs alternate."""
    cases = [Case(name, uniform(episodes), 1, 4096, name) for name in get_args(Wrappers)]
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    with ExitStack() as stack:
        oracle = Oracle.of(cases[0].workload, tokenizer)  # all have one workload
        managers = [stack.enter_context(case.manager(oracle, tokenizer)) for case in cases]
        for index in range(runs + 1):  # the first is a warm-up
            for case, manager in zip(cases, managers, strict=True):
                cost_ms, _, _ = case.take(lambda m=manager, c=case: m.rollout(c.workload.tasks()), oracle)
                found[case.name] += [cost_ms] if index else []
    lines = []
    for name, values in found.items():
        ratios = [mine / base for mine, base in zip(values, found["none"], strict=True)]
        lines.append(f"{name:34s} {format_spread(values):20s}  {format_spread(ratios)}")
    return lines


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="measured runs per case (default: %(default)s)")
    parser.add_argument("--episodes", type=int, default=256, help="episodes per run (default: %(default)s)")
    parser.add_argument("--latency", action="store_true", help="also measure makespan with heavy-tailed tool latencies")
    parser.add_argument("--wrappers", action="store_true", help="also measure wrapped parts")
    parser.add_argument("--with", dest="kind", choices=get_args(Wrappers), help="wrappers of the run of --once")
    parser.add_argument("--once", type=int, metavar="N", help="run N episodes of turnwise alone, and print nothing")
    parser.add_argument("--json", type=Path, help="write the values of every run to this file")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(CACHE)
    if arguments.once:
        Case("once", uniform(arguments.once), 1, 4096, arguments.kind).run_once(tokenizer)
        return
    print(describe_machine())
    print(f"CPU milliseconds per turn, whole process; median (min-max) of {arguments.runs} runs")
    print(f"{'':34s} {'bare loop':20s}  {'turnwise':20s}  ratio")
    rows = []
    for case in build_cases(arguments.episodes):
        rows.append(case.measure(tokenizer, arguments.runs))
        print(format_row(rows[-1]), flush=True)
    if arguments.latency:
        print("makespan relative to the critical path, 256 episodes:")
        print("\n".join(measure_makespans(tokenizer, arguments.runs)))
    if arguments.wrappers:
        print(
            f"CPU milliseconds per turn with wrappers, and relative to none; {arguments.episodes} episodes of 4 turns:"
        )
        print("\n".join(measure_wrappers(tokenizer, arguments.runs, arguments.episodes)))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
