"""Builds the parts of simulated workers and replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from attrs import define, field

from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import EngineClient, Limits
from turnwise.plugin.host import load
from turnwise.plugin.registry import Entry
from turnwise.protocols import GroupReward, ReplicaLoad, Resources, Reward, Router
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise.types import GenerateRequest, PluginRecipe
from turnwise_testing.simulation.agents import END, Count, Length, Wanderer
from turnwise_testing.simulation.replica_parts import SimulatedTransport, Trainer, WatchedEngine
from turnwise_testing.simulation.run_parts import Pace, RunContent, weights_of


class RandomRouter:
    """Chooses any available replica."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: GenerateRequest, replicas: Sequence[ReplicaLoad]) -> int:
        return self._rng.choice([index for index, each in enumerate(replicas) if each.available])

    def release(self, trajectory_id: str) -> None:
        """Do nothing: the router remembers nothing."""


def _default_router() -> Router:
    entry = _default_entry()
    router: Router = entry.factory(entry.config(), Resources())
    return router


@cache  # a simulation starts many workers
def _default_entry() -> Entry[Router]:
    return load(PluginRecipe(allow=("routers",))).entry("routers", "least_tokens")


@define(eq=False)
class SimulatedBlueprint:
    """
    Builds the parts of the simulated actors.

    Attributes:
        faults: draws the latencies of engines and tools; None for none.
        trainer: knows the weights of each version.
        transport: of the driver and of all replicas.
        engines: all engines so far.
    """

    content: RunContent
    faults: random.Random | None
    trainer: Trainer
    transport: SimulatedTransport
    random_router: bool
    engines: list[WatchedEngine] = field(factory=list)

    def make_engine(self) -> WatchedEngine:
        faults, content = self.faults, self.content
        engine = WatchedEngine(
            name=f"engine {len(self.engines)}",
            trainer=self.trainer,
            policy=content.policy,
            weights=weights_of(self.trainer.contents[0]),
            capabilities=content.capabilities,
            latency_s=Pace.draw(faults) if faults else 0.0,
            token_latency_s=Pace.draw(faults) if faults else 0.0,
            update_s=self.transport.read_s,
            step_s=Pace.draw(faults),
            record=False,
        )
        self.engines.append(engine)
        return engine

    def make_components(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerComponents:
        tool: Any = Count(Pace.draw(self.faults))
        program = EpisodeProgram(agent=Wanderer(), reward=Length(), tools=ToolBox([tool]))
        return WorkerComponents(
            engine=engine,
            programs={"wanderer": program},
            limits=Limits(response_length=160, max_steps=50),
            stop_token_ids=(END,),
            max_in_flight=self.content.max_in_flight,
        )

    def make_router(self) -> Router:
        return RandomRouter(self.faults) if self.faults and self.random_router else _default_router()

    def make_transport(self) -> SimulatedTransport:
        return self.transport

    def make_judge_engine(self) -> WatchedEngine:
        raise NotImplementedError("there is no judge")

    def make_reward(self, judge: EngineClient | None = None) -> Reward | None:
        return None

    def make_group_reward(self, judge: EngineClient | None = None) -> GroupReward | None:
        return None
