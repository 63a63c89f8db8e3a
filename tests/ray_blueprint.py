"""A blueprint of scripted parts for the tests on Ray; every actor imports it."""

import asyncio
import os
import threading
import time
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from turnwise import State
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.runtime.remote import channel
from turnwise.runtime.remote.channel import Channel
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise.types import ToolCall
from turnwise_plain_functions import tool
from turnwise_routers import LeastTokens, LeastTokensConfig
from turnwise_testing.engines.scripted import Failure, RandomPolicy, ScriptedEngine

END = 255
POLICY = RandomPolicy(seed=1, vocab_size=250, end_token_id=END, mean_tokens=12)


@frozen
class FourTurns:
    """
    Four turns with a tool call between them; the uid of a task may ask for a fault.

    Attributes:
        folder: a file `blocked` is there when an episode blocks its event loop.
    """

    folder: str = ""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), "uint8"))
            return State.GENERATING
        if episode.task.uid.startswith("kills-worker") and episode.trajectory.turns():
            os._exit(1)
        if episode.task.uid.startswith("loop-blocks") and episode.trajectory.turns():
            touch(Path(self.folder, "blocked"))
            time.sleep(1000)  # noqa: ASYNC251 - a fault that a test looks for
        result = await episode.generate(max_tokens=30)
        if len(episode.trajectory.turns()) == 4:
            return State.TERMINATED
        await episode.call_tool(ToolCall(name="wait", arguments={"what": episode.task.uid}))
        episode.observe(result.token_ids[:2])
        return State.GENERATING


def touch(path):
    """Create a file."""
    path.touch()


def wait(what: str) -> str:
    """
    Return the uid, or misbehave as it asks.

    Args:
        what: uid of the task.
    """
    if what.startswith("tool-blocks"):
        time.sleep(3)
    if what.startswith("tool-hangs"):
        threading.Event().wait()
    if what.startswith("tool-raises"):
        raise ValueError("as asked")
    return what


class HeldEngine(ScriptedEngine):
    """
    An engine whose requests wait while its folder has a file `hold`; each one that waits has a file `held-ID` there.

    Attributes:
        hold_after: requests with at most so many tokens do not wait.
    """

    folder: str = ""
    hold_after: int = 0

    def _is_held(self):
        return bool(self.folder) and Path(self.folder, "hold").exists()

    async def generate(self, request):
        if len(request.token_ids) > self.hold_after and self._is_held():
            touch(Path(self.folder, f"held-{request.request_id}"))
            while self._is_held():  # noqa: ASYNC110 - another process removes the file
                await asyncio.sleep(0.01)
        return await super().generate(request)


@frozen
class ScriptedBlueprint:
    """
    Scripted engines with a latency, which leaves time to kill an actor.

    Attributes:
        folder: requests wait while it has a file `hold`; a file `blocked` is there when an episode blocks its loop.
        hold_after: as in `HeldEngine`.
    """

    token_latency_s: float = 0.002
    tool_call_s: float = 1.0
    folder: str = ""
    hold_after: int = 0

    def make_engine(self):
        engine = HeldEngine(policy=POLICY, token_latency_s=self.token_latency_s, record=False)
        engine.folder, engine.hold_after = self.folder, self.hold_after
        return engine

    def make_components(self, engine, judge=None):
        program = EpisodeProgram(agent=FourTurns(self.folder), tools=ToolBox([tool(wait)]))
        limits = Limits(response_length=400, tool_call_s=self.tool_call_s)
        return WorkerComponents(engine=engine, programs={"four": program}, limits=limits, stop_token_ids=(END,))

    def make_router(self):
        return LeastTokens(LeastTokensConfig())


class LethalEngine(ScriptedEngine):
    """An engine whose process ends in the first turn of some episodes; others sample a few tokens meanwhile."""

    async def generate(self, request):
        if bytes(request.token_ids[:13].tolist()) == b"kills-replica":
            await asyncio.sleep(self.token_latency_s)
            os._exit(1)
        if bytes(request.token_ids[:14].tolist()) == b"cancels-engine":
            raise asyncio.CancelledError
        return await super().generate(request)

    async def abort(self, request_id):
        await super().abort(request_id)
        raise KeyboardInterrupt


@frozen
class LethalBlueprint(ScriptedBlueprint):
    """Engines that some requests kill, and that raise what an engine must not."""

    turn_s: float = 600.0

    def make_engine(self):
        return LethalEngine(policy=POLICY, token_latency_s=self.token_latency_s, record=False)

    def make_components(self, engine, judge=None):
        parts = super().make_components(engine)
        return evolve(parts, limits=evolve(parts.limits, turn_s=self.turn_s))


@frozen
class DyingBlueprint(ScriptedBlueprint):
    """
    A blueprint whose first engine dies of a request, while its process and event loop keep running.

    Attributes:
        died: file that exists once an engine was made to die.
    """

    died: str = ""

    def make_engine(self):
        engine = super().make_engine()
        try:
            with open(self.died, "x", encoding="utf-8"):
                engine.failures = {20: Failure.DIE}
        except FileExistsError:
            pass
        return engine


class CuttingEngine(ScriptedEngine):
    """An engine that cuts all channels of its process at every fortieth request, as a fault of the network does."""

    num_requests = 0

    async def generate(self, request):
        self.num_requests += 1
        if self.num_requests % 40 == 0:
            for each in CHANNELS:
                each.cut()
            CHANNELS.clear()
        return await super().generate(request)


CHANNELS = []
"""Open channels of this process."""


class CutChannel(Channel):
    """A channel that can be cut."""

    def cut(self):
        self._writer.transport.abort()


def open_cut_channel(*ends):
    """Return a channel that `CuttingEngine` finds."""
    CHANNELS.append(CutChannel(*ends))
    return CHANNELS[-1]


@frozen
class CuttingBlueprint(ScriptedBlueprint):
    """Replicas whose channels are cut again and again."""

    def make_engine(self):
        channel.Channel = open_cut_channel  # a server of this process calls it for each connection
        return CuttingEngine(policy=POLICY, token_latency_s=self.token_latency_s, record=False)
