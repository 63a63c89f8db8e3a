"""Plugins that misbehave where the uid of a task asks for it, and a blueprint of them for both runtimes."""

import asyncio
import contextlib
import time
from pathlib import Path

import numpy as np
from attrs import field, frozen

from turnwise import Capabilities, FinishReason, GenerateResult, Observer, Reply, State, ToolCall, ToolResult
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise.types import TrajectoryScore
from turnwise_plain_functions import tool
from turnwise_routers import LeastTokens, LeastTokensConfig

EXCEPTIONS = {
    kind.__name__: kind for kind in (RuntimeError, asyncio.CancelledError, SystemExit, GeneratorExit, KeyboardInterrupt)
}
SWALLOWS = "swallows"
"""Misbehaviour besides the exceptions: code that ignores its cancellation, or blocks its thread."""

_OBSERVERS = ("on_turn_finished", "on_episode_finished")
_SPAWNED = []


def uid_of(place, kind):
    """Return the uid of a task whose episode misbehaves in a place."""
    return f"{place}|{kind}"


@frozen
class Saboteur:
    """
    Misbehaves when the code of the place that a uid names runs.

    Attributes:
        over: file; once it exists, code that swallows its cancellation ends.
    """

    over: str

    async def at(self, place, uid):
        if uid.startswith(f"{place}|"):
            await self._misbehave(uid)

    async def in_child(self, place, uid):
        if uid.startswith(f"{place}|"):
            await self.leave_child(place, uid)

    def leave_child(self, place, uid):
        if uid.startswith(f"{place}|"):
            _SPAWNED.append(asyncio.get_running_loop().create_task(self._misbehave(uid)))
            return _SPAWNED[-1]
        return None

    def now(self, place, uid):
        if uid.startswith(f"{place}|"):
            kind = uid.partition("|")[2]
            if kind != SWALLOWS:
                raise EXCEPTIONS[kind]("sabotage")
            while not Path(self.over).exists():
                time.sleep(0.01)

    async def _misbehave(self, uid):
        kind = uid.partition("|")[2]
        if kind != SWALLOWS:
            raise EXCEPTIONS[kind]("sabotage")
        while not Path(self.over).exists():  # noqa: ASYNC240 - a fault that a test looks for
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


class Engine:
    """Answers with one turn; a request whose abort is sabotaged hangs."""

    capabilities = Capabilities(abort=True)

    def __init__(self, saboteur):
        self.saboteur, self.hung = saboteur, {}

    async def start(self):
        pass

    async def stop(self):
        pass

    def stats(self):
        return {}

    async def generate(self, request):
        await self.saboteur.at("engine.generate", request.group_id)
        if request.group_id.startswith("engine.abort|"):
            self.hung[request.request_id] = request.group_id
            await asyncio.Event().wait()
        return GenerateResult(token_ids=[7, 8], logprobs=[-0.5, -0.5], finish_reason=FinishReason.STOP)

    async def abort(self, request_id):
        await self.saboteur.at("engine.abort", self.hung.get(request_id, ""))


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
        await self.saboteur.in_child("child of a reward", episode.task.uid)
        return TrajectoryScore(value=1.0)


class SyncReward(AsyncReward):
    """Scores in a thread."""

    def score(self, episode):
        self.saboteur.now("sync reward", episode.task.uid)
        return TrajectoryScore(value=1.0)


class Watcher(Observer):
    """Hears of one episode. Each bad task has a separate one, because an observer that raises hears no more."""

    def __init__(self, saboteur, uid):
        self.saboteur, self.uid = saboteur, uid

    def on_turn_finished(self, event):
        if event.uid.split("/")[0] == self.uid:
            self.saboteur.now("on_turn_finished", self.uid)

    def on_episode_finished(self, event):
        if event.task.uid == self.uid:
            self.saboteur.now("on_episode_finished", self.uid)


@frozen
class SabotageBlueprint:
    """
    Plugins that misbehave.

    Attributes:
        over: as in `Saboteur`.
        limits: of every episode.
        sync_reward: the reward of the reward workers is synchronous; workers have both, by the name of the agent.
    """

    over: str
    limits: Limits = field(factory=Limits)
    sync_reward: bool = False

    def make_engine(self):
        return Engine(Saboteur(self.over))

    def make_reward(self, judge=None):
        return (SyncReward if self.sync_reward else AsyncReward)(Saboteur(self.over))

    def make_components(self, engine, judge=None):
        saboteur = Saboteur(self.over)

        def blocking(uid: str) -> str:
            """Answer in a thread."""
            saboteur.now("sync tool", uid)
            return "done"

        tools, agent = ToolBox([LookTool(saboteur), tool(blocking)]), Agent(saboteur)
        rewards = {"agent": AsyncReward(saboteur), "sync": SyncReward(saboteur)}
        programs = {name: EpisodeProgram(agent=agent, reward=reward, tools=tools) for name, reward in rewards.items()}
        watchers = [Watcher(saboteur, uid_of(place, kind)) for place in _OBSERVERS for kind in EXCEPTIONS]
        return WorkerComponents(
            engine=engine,
            programs=programs,
            limits=self.limits,
            interaction=User(saboteur),
            observers=Observers.of(watchers),
        )

    def make_router(self):
        return LeastTokens(LeastTokensConfig())
