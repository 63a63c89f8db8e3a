"""A blueprint whose episodes are run by outside agents; every actor imports it."""

import sys
from pathlib import Path

from attrs import field, frozen
from ray_blueprint import HeldEngine, ScriptedBlueprint

from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.runtime.worker import WorkerComponents
from turnwise_gateway import make_external
from turnwise_gateway.config import ExternalConfig
from turnwise_reported_reward import ReportedReward
from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_testing.probes.agent import AgentProbe, probe_chat, probe_resources

TURNS = ("The answer is 42.", *['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'] * 2)
PROGRAMS = Path(__file__).parents[1] / "plugins/gateway/tests/programs"
AGENTS = Path(__file__).parents[1] / "plugins/task_pool/tests/programs"


@frozen
class ExternalBlueprint(ScriptedBlueprint):
    """
    Replicas that call a tool two times out of three.

    Attributes:
        control_file: for agents that pull; empty for programs that the workers start.
        pull: further options of the control port.
        program: name and arguments of the program that is started otherwise.
    """

    token_latency_s: float = 0.0005
    control_file: str = ""
    pull: dict = field(factory=dict)
    program: tuple[str, ...] = ()

    def make_engine(self):
        choose = AgentProbe(make_agent=lambda: None, turns=TURNS).choose
        engine = HeldEngine(choose, token_latency_s=self.token_latency_s, record=False)
        engine.folder = self.folder
        return engine

    def make_agent(self):
        """Build the agent, also for its service in the driver."""
        if self.control_file:
            return make_agent(PoolConfig(control_file=self.control_file, **self.pull), probe_resources())
        name, *arguments = self.program
        config = ExternalConfig(command=(sys.executable, str(PROGRAMS / name), *arguments))
        return make_external(config, probe_resources())

    def make_components(self, engine, judge=None):
        return WorkerComponents(
            engine=engine,
            programs={"external": EpisodeProgram(agent=self.make_agent(), reward=ReportedReward())},
            limits=Limits(prompt_length=1 << 16, response_length=1 << 14),
            stop_token_ids=probe_chat().stop_token_ids,
            default_agent="external",
        )
