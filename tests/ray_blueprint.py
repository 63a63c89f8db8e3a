"""What the processes of the Ray tests build their parts from; importable in every actor."""

import os
import threading
import time

from attrs import frozen

from turnwise import State
from turnwise.driver import Recipe
from turnwise.episode_setup import Limits
from turnwise.function_tool import function_tool
from turnwise.routing import LeastTokens, LeastTokensConfig
from turnwise.runtime.worker import WorkerParts
from turnwise.testing.scripted import Failure, RandomPolicy, ScriptedEngine
from turnwise.tools import ToolBox
from turnwise.types import ToolCall

END = 255


class FourTurns:
    """Four turns with a tool call between them; a task's uid may ask for a fault."""

    async def step(self, episode):
        """Make one transition."""
        if episode.state == State.PENDING:
            episode.begin(__import__("numpy").frombuffer(episode.task.uid.encode(), "uint8"))
            return State.GENERATING
        if episode.task.uid.startswith("kills-worker") and episode.trajectory.turns():
            os._exit(1)
        if episode.task.uid.startswith("loop-blocks") and episode.trajectory.turns():
            time.sleep(1000)  # noqa: ASYNC251 - a fault that a test looks for
        result = await episode.generate(max_tokens=30)
        if len(episode.trajectory.turns()) == 4:
            return State.TERMINATED
        await episode.call_tool(ToolCall(name="wait", arguments={"what": episode.task.uid}))
        episode.observe(result.token_ids[:2])
        return State.GENERATING


def wait(what: str) -> str:
    """
    Behave as the task asks.

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


@frozen
class ScriptedBlueprint:
    """Scripted engines with a latency, so that there is time to kill something."""

    token_latency_s: float = 0.002
    tool_call_s: float = 1.0

    def make_engine(self):
        """Build a replica's engine."""
        policy = RandomPolicy(seed=1, vocab_size=250, end_token_id=END, mean_tokens=12)
        return ScriptedEngine(policy=policy, token_latency_s=self.token_latency_s, record=False)

    def make_parts(self, engine):
        """Build a worker's parts."""
        recipe = Recipe(agent=FourTurns(), tools=ToolBox([function_tool(wait)]))
        limits = Limits(response_length=400, tool_call_s=self.tool_call_s)
        return WorkerParts(engine=engine, recipes={"four": recipe}, limits=limits, stop_token_ids=(END,))

    def make_router(self):
        """Build a router."""
        return LeastTokens(LeastTokensConfig())


@frozen
class DyingBlueprint(ScriptedBlueprint):
    """
    Its first engine dies of a request, while its process and event loop live on.

    Attributes:
        died: file that is there once an engine has been made to die.
    """

    died: str = ""

    def make_engine(self):
        """Build a replica's engine."""
        engine = super().make_engine()
        try:
            with open(self.died, "x", encoding="utf-8"):
                engine.failures = {20: Failure.DIE}
        except FileExistsError:
            pass
        return engine
