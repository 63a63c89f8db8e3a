"""A run without events reports its waits; all in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import evolve
from structlog.testing import capture_logs

from turnwise import Capabilities, FinishReason, GenerateRequest, GenerateResult, State, Task, ToolCall, ToolResult
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer, RunWaiting, Wait
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.wait_reports import WaitReports
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise_testing.simulation.virtual_loop import VirtualLoop

PATIENT = Limits(tool_call_s=1e6, turn_s=1e6, episode_s=1e6, reward_s=1e6)


class Part:
    """The agent, engine, tool and reward of a run, of which one takes `seconds`."""

    capabilities = Capabilities()
    schema: ClassVar[Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    def __init__(self, slow: str, seconds: float, num_slow: int = 1000) -> None:
        self.slow, self.seconds, self.num_slow = slow, seconds, num_slow

    async def wait(self, part: str) -> None:
        if part == self.slow and self.num_slow:
            self.num_slow -= 1
            await asyncio.sleep(self.seconds)

    async def start(self) -> None:
        await self.wait("start")

    async def stop(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await self.wait("engine")
        return GenerateResult(token_ids=[7], logprobs=[-1.0], finish_reason=FinishReason.STOP)

    async def abort(self, request_id: str) -> None: ...

    async def create(self, task: Task) -> None: ...

    async def execute(self, session: object, arguments: object) -> ToolResult:
        await self.wait("tool")
        return ToolResult(text="seen")

    async def release(self, session: object) -> float:
        await self.wait("release")
        return 0.0

    async def step(self, episode: Any) -> str:
        episode.begin(np.array([1]))
        await episode.generate()
        await episode.call_tool(ToolCall(name="look", arguments={}))
        await self.wait("agent")
        return State.TERMINATED

    async def score(self, episode: object) -> float:
        await self.wait("reward")
        return 1.0


class Heard(Observer):
    def __init__(self) -> None:
        self.waits: list[RunWaiting] = []

    def on_run_waiting(self, event: RunWaiting) -> None:
        self.waits.append(event)


def run(part: Part, num_episodes: int = 3) -> tuple[list[Any], list[RunWaiting]]:
    """Run episodes with reports; return the log lines of the reports, and their events."""
    heard = Heard()
    observers = Observers.of([heard])
    program = EpisodeProgram(agent=part, reward=part, tools=ToolBox([part], release_s=1e6))
    parts = WorkerComponents(engine=part, programs={"a": program}, limits=PATIENT, observers=observers)
    runtime = LocalRuntime(part, parts)
    reports = WaitReports(runtime, observers)

    async def main() -> None:
        reporting = asyncio.get_running_loop().create_task(reports.run())
        with reports.stage("the start of the runtime"):
            await runtime.start()
        task = Task(messages=({"role": "user", "content": "x"},), uid="t")
        specs = [EpisodeSpec(task=evolve(task, uid=f"t{i}"), agent_name="a") for i in range(num_episodes)]
        reports.num_calls = 1
        await runtime.run(EpisodeFeed.of(specs), lambda _number, _result: None)
        reports.num_calls = 0
        await asyncio.sleep(100)
        reporting.cancel()
        with suppress(asyncio.CancelledError):
            await reporting

    with capture_logs() as lines, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    return [line for line in lines if line["event"] == "the run waits"], heard.waits


@pytest.mark.many_cases(2)
@pytest.mark.parametrize(
    ("slow", "part"),
    [
        ("engine", "engine"),
        ("tool", "tool 'look'"),
        ("agent", "agent 'a'"),
        ("reward", "reward Part"),
        ("release", "release of the tools"),
    ],
)
def test_a_run_says_what_its_episodes_wait_for(slow: str, part: str) -> None:
    """From about ten seconds on, with the number of episodes and the time; rarer and rarer, and never afterwards."""
    lines, events = run(Part(slow, 100.0))

    assert [10, 20, 40, 80] == [line["seconds"] // 5 * 5 for line in lines]
    assert [f"3 episodes: {part} for {lines[0]['seconds']} s, longest t0/0 on worker 0"] == lines[0]["waits_for"]
    *waiting, over = events
    assert 4 == len(waiting)
    assert (part, 3) == (waiting[0].waits[0].part, waiting[0].waits[0].num_episodes)
    assert RunWaiting(seconds=0.0) == over


def test_the_start_of_a_runtime_is_named() -> None:
    """An engine may load for minutes."""
    lines, _events = run(Part("start", 30.0))
    assert "the start of the runtime for 10 s" in lines[0]["waits_for"]


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("slow", ["engine", "tool", "agent", "reward"])
def test_a_run_with_events_says_nothing(slow: str) -> None:
    """Nine seconds for each wait are no silence, however long the episodes take."""
    assert ([], []) == run(Part(slow, 9.0))


@pytest.mark.slow
def test_the_waits_of_a_few_episodes_are_named_when_the_others_have_ended() -> None:
    """One of twenty episodes waits for an engine that never answers it."""
    lines, _events = run(Part("engine", 1e4, num_slow=1), num_episodes=20)
    assert lines[0]["waits_for"][0].startswith("1 episode: engine for 1")


def test_many_parts_are_cut() -> None:
    """A line stays short however many parts there are."""

    class Runtime:
        async def waits(self) -> list[Wait]:
            return [Wait(part=f"replica {i}", num_episodes=1, seconds=20.0, shortest_s=20.0) for i in range(30)]

    reports = WaitReports(Runtime(), Observers())  # type: ignore[arg-type]  # it needs this method alone
    reports.num_calls = 1

    async def main() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(3):
                await reports.run()

    with capture_logs() as lines, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    assert (6, "and 25 other parts") == (len(lines[0]["waits_for"]), lines[0]["waits_for"][-1])
