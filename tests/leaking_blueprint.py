"""A blueprint whose actors start processes: for tools, for a sandbox, and for the comparison of answers."""

import os
import tempfile

import numpy as np
from attrs import evolve, frozen
from ray_blueprint import END, ScriptedBlueprint
from ray_judge_blueprint import judge_client

from turnwise import State
from turnwise.episode.driver import EpisodeProgram
from turnwise.protocols import Resources
from turnwise.runtime.judge import JudgeClient
from turnwise.tools.toolbox import ToolBox
from turnwise.types import ToolCall
from turnwise_plain_functions import tool
from turnwise_python_sandbox.config import PythonToolConfig, SandboxConfig
from turnwise_python_sandbox.tool import PythonTool
from turnwise_torl_python.verifier import shared_verifier


def double(number: int) -> int:
    """
    Double a number.

    Args:
        number: any.
    """
    return 2 * number


class Caller:
    """Four turns, with a call of each tool between them."""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), "uint8"))
            return State.GENERATING
        result = await episode.generate(max_tokens=30)
        if len(episode.trajectory.turns()) == 4:
            return State.TERMINATED
        await episode.call_tool(ToolCall(name="double", arguments={"number": 21}))
        await episode.call_tool(ToolCall(name="python", arguments={"code": "print(6 * 7)"}))
        episode.observe(result.token_ids[:2])
        return State.GENERATING


@frozen
class Comparison:
    """Scores with a comparison in another process, and asks the judge if there is one."""

    judge: JudgeClient | None = None

    async def score(self, episode):
        if self.judge is not None:
            await self.judge.ask([{"role": "user", "content": episode.task.uid}])
        return float(await shared_verifier(20.0, 1).equals("x + 1", "1 + x"))


@frozen
class LeakingBlueprint(ScriptedBlueprint):
    """
    Actors that start processes.

    Attributes:
        temporary: directory for the temporary files of all actors.
    """

    temporary: str = ""

    def make_engine(self):
        self._use_directory()
        return super().make_engine()

    def make_reward(self, judge=None):
        self._use_directory()
        return Comparison(judge and judge_client(judge))

    def make_judge_engine(self):
        return self.make_engine()

    def make_components(self, engine, judge=None):
        self._use_directory()
        python = PythonTool(PythonToolConfig(sandbox=SandboxConfig(servers=1)), Resources())
        tools = ToolBox([tool(double, run_in="process"), python])
        parts = super().make_components(engine)
        limits = evolve(parts.limits, tool_call_s=60.0, reward_s=60.0)
        programs = {"four": EpisodeProgram(agent=Caller(), reward=self.make_reward(judge), tools=tools)}
        return evolve(parts, programs=programs, limits=limits, stop_token_ids=(END,))

    def _use_directory(self):
        os.environ["TMPDIR"] = tempfile.tempdir = self.temporary
