"""What runs of the observability tests are built from: turns with parallel tool calls, and a reward."""

import asyncio

import numpy as np
from attrs import frozen
from ray_blueprint import END, ScriptedBlueprint, wait

from turnwise import State
from turnwise.config_runtime import RayConfig, RuntimeConfig
from turnwise.driver import Recipe
from turnwise.episode_setup import Limits
from turnwise.function_tool import function_tool
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime
from turnwise.runtime.worker import WorkerParts
from turnwise.telemetry import Observers
from turnwise.tools import ToolBox
from turnwise.types import Task, ToolCall

NUM_TURNS = 3


class TwoCallsATurn:
    """Three turns; after each but the last, two tool calls at the same time."""

    async def step(self, episode):
        """Make one transition."""
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), "uint8"))
            return State.GENERATING
        result = await episode.generate(max_tokens=10)
        if len(episode.trajectory.turns()) == NUM_TURNS:
            return State.TERMINATED
        call = ToolCall(name="wait", arguments={"what": episode.task.uid})
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(episode.call_tool(call))
        episode.observe(result.token_ids[:2])
        return State.GENERATING


class Half:
    """A score that is always one half."""

    async def score(self, _episode):
        """Take a moment."""
        await asyncio.sleep(0.002)
        return 0.5


@frozen
class ObservedBlueprint(ScriptedBlueprint):
    """Parts with a tool that is called twice at a time, and a reward; at most `max_in_flight` episodes at once."""

    max_in_flight: int = 256

    def make_parts(self, engine):
        """Build a worker's parts."""
        recipe = Recipe(agent=TwoCallsATurn(), tools=ToolBox([function_tool(wait)]), reward=Half())
        return WorkerParts(
            engine=engine,
            recipes={"two": recipe},
            limits=Limits(response_length=400, tool_call_s=1.0),
            stop_token_ids=(END,),
            max_in_flight=self.max_in_flight,
        )


PLAN = RolloutPlan(default_agent="two", agent_names=frozenset({"two"}))


def local_manager(*observers, blueprint=None):
    """Return a manager of this process."""
    blueprint = blueprint or ObservedBlueprint(0.001)
    heard = Observers.of(observers)
    engine = blueprint.make_engine()
    parts = blueprint.make_parts(engine)
    for observer in observers:
        parts.observers.add(observer)
    return RolloutManager(LocalRuntime(engine, parts, 2), PLAN, heard)


def ray_manager(*observers, blueprint=None, **options):
    """Return a manager with two workers and two replicas as Ray actors."""
    ray_options = RayConfig(backoff_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=2.0, **options)
    config = RuntimeConfig(name="ray", num_workers=2, num_replicas=2, ray=ray_options)
    heard = Observers.of(observers)
    return RolloutManager(RayRuntime(blueprint or ObservedBlueprint(0.001), config, heard), PLAN, heard)


def tasks(count, prefix="task"):
    """Return some tasks."""
    message = {"role": "user", "content": "x"}
    return [Task(messages=(message,), uid=f"{prefix}{i}", sample_index=i) for i in range(count)]
