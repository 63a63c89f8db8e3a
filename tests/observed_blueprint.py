"""A blueprint for the tests of observability: turns with parallel tool calls, and a reward."""

import asyncio
import os
from pathlib import Path

import numpy as np
import structlog
from attrs import frozen
from ray_blueprint import END, POLICY, ScriptedBlueprint, wait

from turnwise import State
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.events.logging import configure_logging
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.placement import plan_runtime_placement
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise.types import ToolCall
from turnwise_plain_functions import tool
from turnwise_testing.engines.scripted import ScriptedEngine

NUM_TURNS = 3


class TwoCallsATurn:
    """Three turns, with two parallel tool calls after the first and the second."""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), "uint8"))
            return State.GENERATING
        result = await episode.generate(max_tokens=10)
        number = len(episode.trajectory.turns())
        episode.messages.append({"role": "assistant", "content": f"answer {number} of {episode.task.uid}"})
        if len(episode.trajectory.turns()) == NUM_TURNS:
            return State.TERMINATED
        call = ToolCall(name="wait", arguments={"what": episode.task.uid})
        function = {"name": call.name, "arguments": call.arguments}
        episode.messages[-1]["tool_calls"] = [{"type": "function", "function": function}] * 2
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(episode.call_tool(call)) for _ in range(2)]
        episode.observe(result.token_ids[:2])
        episode.record_metric("tool_output_tokens", 2)
        episode.messages += [{"role": "tool", "content": each.result().text} for each in running]
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


STREAMS = []
"""Files that `log_to` opened in this process."""


def log_to(folder):
    """Write the log of this process to a separate file. Idempotent."""
    path = Path(folder, f"{os.getpid()}.log")
    if not path.exists():
        STREAMS.append(path.open("a", encoding="utf-8"))
        configure_logging("info", "json", STREAMS[-1])


class LoggingEngine(ScriptedEngine):
    """An engine that logs its requests."""

    async def generate(self, request):
        structlog.get_logger().info("engine called")
        return await super().generate(request)


class LoggingHalf:
    """A score of one half; it logs its calls, and runs in a thread of a reward worker."""

    def score(self, _episode):
        structlog.get_logger().info("reward called")
        return 0.5


def logging_wait(what: str) -> str:
    """
    Log a call, and return its argument.

    Args:
        what: the argument.
    """
    structlog.get_logger().info("tool called")
    return what


@frozen
class LoggingBlueprint(ScriptedBlueprint):
    """An engine, a tool and a reward that log; `logs` is the folder with a file for each process."""

    logs: str = ""

    def make_engine(self):
        log_to(self.logs)
        return LoggingEngine(policy=POLICY, token_latency_s=self.token_latency_s, record=False)

    def make_reward(self, _judge=None):
        log_to(self.logs)
        return LoggingHalf()

    def make_components(self, engine, judge=None):
        log_to(self.logs)
        named = tool(logging_wait, name="wait")
        program = EpisodeProgram(agent=TwoCallsATurn(), tools=ToolBox([named]), reward=LoggingHalf())
        limits = Limits(response_length=400)
        return WorkerComponents(engine=engine, programs={"two": program}, limits=limits, stop_token_ids=(END,))


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


def ray_manager(*observers, blueprint=None, reward_workers=0, **options):
    """Return a manager with two workers and two replicas as Ray actors."""
    ray_options = RayConfig(backoff_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=120.0, **options)
    counts = {"num_workers": 2, "num_replicas": 2, "reward_workers": reward_workers}
    config = RuntimeConfig(name="ray", **counts, ray=ray_options)
    dispatcher, placement = Observers.of(observers), plan_runtime_placement(config)
    runtime = RayRuntime(blueprint or ObservedBlueprint(0.001), config, dispatcher, placement)
    return RolloutManager(runtime, PLAN, dispatcher)
