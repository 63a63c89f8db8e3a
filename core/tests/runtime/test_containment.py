"""A plugin that raises anything, anywhere, or swallows its cancellation costs its own episode and no other."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

from turnwise import (
    Capabilities,
    FinishReason,
    GenerateResult,
    Observer,
    Reply,
    State,
    Status,
    Task,
    ToolCall,
    ToolResult,
    TrajectoryScore,
)
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.errors import InfrastructureError
from turnwise.events.dispatch import Observers
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.loop_thread import LoopThread
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.function import function_tool
from turnwise.tools.toolbox import ToolBox

NUM_TASKS = 4
WATCHDOG_S = 60
STRICT = Limits(tool_call_s=0.3, reward_s=0.3, turn_s=1.0, episode_s=2.0, abort_grace_s=0.1)


class Saboteur:
    """Calls `sabotage` when the code of a place runs for the bad task."""

    def __init__(self, place, sabotage):
        self.place, self.sabotage, self.spawned = place, sabotage, []

    async def at(self, place, uid):
        if uid == "bad" and place == self.place:
            await self.sabotage()

    async def in_child(self, place, uid):
        if uid == "bad" and place == self.place:
            self.spawned.append(asyncio.get_running_loop().create_task(self.sabotage()))
            await self.spawned[-1]

    def leave_child(self, place, uid):
        if uid == "bad" and place == self.place:
            self.spawned.append(asyncio.get_running_loop().create_task(self.sabotage()))

    def now(self, place, uid):
        if uid == "bad" and place == self.place:
            with pytest.raises(StopIteration):
                self.sabotage().send(None)


class Engine:
    """Answers with one turn; the bad task's request hangs if its abort is sabotaged."""

    capabilities = Capabilities(abort=True)

    def __init__(self, saboteur):
        self.saboteur = saboteur

    async def start(self):
        pass

    async def stop(self):
        pass

    async def generate(self, request):
        await self.saboteur.at("engine.generate", request.group_id)
        if request.group_id == "bad" and self.saboteur.place == "engine.abort":
            await asyncio.Event().wait()
        return GenerateResult(token_ids=[7, 8], logprobs=[-0.5, -0.5], finish_reason=FinishReason.STOP)

    async def abort(self, _request_id):
        await self.saboteur.at("engine.abort", "bad")


class Agent:
    """Samples a turn, calls both tools and asks the user."""

    def __init__(self, saboteur):
        self.saboteur = saboteur

    async def step(self, episode):
        uid = episode.task.uid
        episode.begin(np.array([1, 2]))
        await self.saboteur.at("agent.step", uid)
        await self.saboteur.in_child("child of an agent", uid)
        await episode.generate()
        await episode.call_tool(ToolCall(name="look"))
        await episode.call_tool(ToolCall(name="blocking", arguments={"uid": uid}))
        await episode.interact()
        return State.TERMINATED


class LookTool:
    """A tool with sessions."""

    schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}  # noqa: RUF012

    def __init__(self, saboteur):
        self.saboteur = saboteur

    async def create(self, task):
        await self.saboteur.at("tool.create", task.uid)
        return task.uid

    async def execute(self, uid, _arguments):
        await self.saboteur.at("tool.execute", uid)
        await self.saboteur.in_child("child of a tool", uid)
        self.saboteur.leave_child("background task of a tool", uid)
        return ToolResult(text="seen")

    async def release(self, uid):
        await self.saboteur.at("tool.release", uid)


class User:
    """A simulated user."""

    def __init__(self, saboteur):
        self.saboteur = saboteur

    async def create(self, task):
        return task.uid

    async def respond(self, uid, _messages):
        await self.saboteur.at("interaction.respond", uid)
        return Reply(content="more")

    async def release(self, uid):
        await self.saboteur.at("interaction.release", uid)


class AsyncReward:
    """Scores on the loop."""

    def __init__(self, saboteur):
        self.saboteur = saboteur

    async def score(self, episode):
        await self.saboteur.at("reward", episode.task.uid)
        return TrajectoryScore(value=1.0)


class SyncReward(AsyncReward):
    """Scores in a thread."""

    def score(self, episode):
        self.saboteur.now("sync reward", episode.task.uid)
        return TrajectoryScore(value=1.0)


class Watcher(Observer):
    """Hears of turns and of the ends of episodes."""

    def __init__(self, saboteur):
        self.saboteur = saboteur

    def on_turn_finished(self, event):
        self.saboteur.now("on_turn_finished", event.uid.split("/")[0])

    def on_episode_finished(self, event):
        self.saboteur.now("on_episode_finished", event.task.uid)


def rollout(place, sabotage, limits=None, over=None):
    """Run one bad and some good tasks, and return all results by task; `over` is set before the runtime stops."""
    saboteur = Saboteur(place, sabotage)

    def blocking(uid: str) -> str:
        """Answer in a thread."""
        saboteur.now("sync tool", uid)
        return "done"

    reward = SyncReward(saboteur) if place == "sync reward" else AsyncReward(saboteur)
    tools = ToolBox([LookTool(saboteur), function_tool(blocking)])
    program = EpisodeProgram(agent=Agent(saboteur), reward=reward, tools=tools)
    engine = Engine(saboteur)
    limits = limits or (Limits(turn_s=0.3, abort_grace_s=0.1) if place == "engine.abort" else Limits())
    parts = WorkerComponents(
        engine=engine,
        programs={"agent": program},
        limits=limits,
        interaction=User(saboteur),
        observers=Observers.of([Watcher(saboteur)]),
    )
    uids = ["bad", *(f"good {index}" for index in range(NUM_TASKS - 1))]
    tasks = [Task(messages=({"role": "user", "content": "hi"},), uid=uid) for uid in uids]
    plan = RolloutPlan(default_agent="agent", agents={"agent": None})
    with RolloutManager(LocalRuntime(engine, parts), plan) as manager, ThreadPoolExecutor(1) as waiter:
        try:
            results = waiter.submit(manager.rollout, tasks).result(WATCHDOG_S)
        finally:
            if over is not None:
                over.set()
    return {result.task.uid: result for result in results}


class Expected(NamedTuple):
    """Status and owner of the bad episode."""

    status: Status
    owner: str | None = None


COMPLETED = Expected(Status.COMPLETED)
OUTCOMES = {
    "tool.execute": Expected(Status.FAILED, "tool"),
    "tool.create": Expected(Status.FAILED, "tool"),
    "child of a tool": Expected(Status.FAILED, "tool"),
    "background task of a tool": COMPLETED,
    "tool.release": COMPLETED,
    "sync tool": COMPLETED,
    "agent.step": Expected(Status.FAILED, "agent"),
    "child of an agent": Expected(Status.FAILED, "agent"),
    "reward": Expected(Status.FAILED, "reward"),
    "sync reward": Expected(Status.FAILED, "reward"),
    "interaction.respond": Expected(Status.FAILED, "agent"),
    "interaction.release": COMPLETED,
    "engine.generate": Expected(Status.FAILED, "engine"),
    "engine.abort": Expected(Status.TIMED_OUT, "engine"),
    "on_turn_finished": COMPLETED,
    "on_episode_finished": COMPLETED,
}
# The model reads these as the answer of the tool, so the episode continues.
READ_BY_THE_MODEL = (RuntimeError, asyncio.CancelledError, SystemExit)


def expect_good(results):
    """The other episodes are complete and scored."""
    good = [result for uid, result in results.items() if uid != "bad"]
    assert [(each.status, each.reward) for each in good] == [(Status.COMPLETED, 1.0)] * (NUM_TASKS - 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", OUTCOMES)
@pytest.mark.parametrize(
    "kind",
    [
        KeyboardInterrupt,
        pytest.param(GeneratorExit, marks=pytest.mark.slow),
        pytest.param(SystemExit, marks=pytest.mark.slow),
        pytest.param(asyncio.CancelledError, marks=pytest.mark.slow),
        pytest.param(RuntimeError, marks=pytest.mark.slow),
    ],
)
def test_an_exception_costs_its_own_episode(place, kind):
    """Whatever a plugin raises, all episodes are delivered, and the fault names the owner of the code."""

    async def sabotage():
        raise kind("sabotage")

    results = rollout(place, sabotage)

    expect_good(results)
    bad = results["bad"]
    is_read = OUTCOMES[place].owner == "tool" and kind in READ_BY_THE_MODEL
    expected = COMPLETED if is_read else OUTCOMES[place]
    assert Expected(bad.status, bad.fault and bad.fault.owner) == expected


@pytest.mark.parametrize(
    ("place", "expected", "num_left"),
    [
        ("tool.execute", COMPLETED, 1),
        ("engine.generate", Expected(Status.TIMED_OUT, "engine"), 1),
        pytest.param("tool.create", COMPLETED, 1, marks=pytest.mark.slow),
        pytest.param("tool.release", COMPLETED, 1, marks=pytest.mark.slow),
        pytest.param("agent.step", Expected(Status.TIMED_OUT, "agent"), 1, marks=pytest.mark.slow),
        pytest.param("interaction.respond", Expected(Status.TIMED_OUT, "agent"), 1, marks=pytest.mark.slow),
        pytest.param("interaction.release", COMPLETED, 1, marks=pytest.mark.slow),
        pytest.param("reward", Expected(Status.FAILED, "reward"), 1, marks=pytest.mark.slow),
        pytest.param("engine.abort", Expected(Status.TIMED_OUT, "engine"), 0, marks=pytest.mark.slow),
    ],
)
def test_code_that_swallows_its_cancellation_is_left_behind(place, expected, num_left):
    """At its deadline the episode continues or ends without the code, counts it, and names its owner."""
    over = threading.Event()

    async def sabotage():
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    results = rollout(place, sabotage, STRICT, over)

    expect_good(results)
    bad = results["bad"]
    assert Expected(bad.status, bad.fault and bad.fault.owner) == expected
    assert bad.metrics.extra.get("left_behind", 0) == num_left


def test_a_blocking_reward_delays_no_other_episode():
    """A sync reward runs in a thread: it fails at `reward_s`, and the others end while it blocks."""
    over = threading.Event()

    async def sabotage():
        over.wait(WATCHDOG_S)

    results = rollout("sync reward", sabotage, STRICT, over)

    expect_good(results)
    bad = results["bad"]
    assert (bad.status, bad.fault.owner, bad.fault.kind) == (Status.FAILED, "reward", "TimeoutError")


def test_a_broken_loop_is_reported_to_every_waiter():
    """When the event loop itself breaks, calls that wait for it raise, and none waits for ever."""
    thread, started = LoopThread(), threading.Semaphore(0)

    async def wait():
        started.release()
        await asyncio.Event().wait()

    def break_loop():
        raise MemoryError("in the loop")

    coroutines = [wait(), wait()]
    futures = [thread.submit(coroutine) for coroutine in coroutines]
    assert all(started.acquire(timeout=WATCHDOG_S) for _ in futures)
    thread.loop.call_soon_threadsafe(setattr, thread.loop, "_run_once", break_loop)

    for future in futures:
        with pytest.raises(InfrastructureError, match="the event loop broke"):
            future.result(WATCHDOG_S)
    for coroutine in coroutines:
        coroutine.close()
