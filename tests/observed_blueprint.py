"""A blueprint for the tests of observability: turns with parallel tool calls, and a reward."""

import asyncio

import numpy as np
from attrs import frozen
from ray_blueprint import END, ScriptedBlueprint, wait

from turnwise import State
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise.types import ToolCall
from turnwise_plain_functions import tool

NUM_TURNS = 3


class TwoCallsATurn:
    """Three turns, with two parallel tool calls after the first and the second."""

    async def step(self, episode):
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
        await asyncio.sleep(0.002)
        return 0.5


@frozen
class ObservedBlueprint(ScriptedBlueprint):
    """Parallel calls of a tool, and a reward; at most `max_in_flight` episodes run at once."""

    max_in_flight: int = 256

    def make_components(self, engine, judge=None):
        program = EpisodeProgram(agent=TwoCallsATurn(), tools=ToolBox([tool(wait)]), reward=Half())
        return WorkerComponents(
            engine=engine,
            programs={"two": program},
            limits=Limits(response_length=400, tool_call_s=1.0),
            stop_token_ids=(END,),
            max_in_flight=self.max_in_flight,
        )


PLAN = RolloutPlan(default_agent="two", agents={"two": None})


def local_manager(*observers, blueprint=None):
    """Return a manager of this process."""
    blueprint = blueprint or ObservedBlueprint(0.001)
    dispatcher = Observers.of(observers)
    engine = blueprint.make_engine()
    parts = blueprint.make_components(engine)
    for observer in observers:
        parts.observers.add(observer)
    return RolloutManager(LocalRuntime(engine, parts, 2), PLAN, dispatcher)


def ray_manager(*observers, blueprint=None, **options):
    """Return a manager with two workers and two replicas as Ray actors."""
    ray_options = RayConfig(backoff_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=120.0, **options)
    config = RuntimeConfig(name="ray", num_workers=2, num_replicas=2, ray=ray_options)
    dispatcher = Observers.of(observers)
    return RolloutManager(RayRuntime(blueprint or ObservedBlueprint(0.001), config, dispatcher), PLAN, dispatcher)
