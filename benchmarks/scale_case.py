"""A workload on Ray with some processes, as the scale model (`scale_limits.py`) predicts it."""

from __future__ import annotations

import os
import random

from attrs import frozen
from scale_model.costs import Costs
from scale_model.result import ScaleResult, simulate
from scale_model.run import Run
from workload import Workload

from turnwise_routing_bench.traces import TraceTrajectory, TraceTurn


@frozen
class Case:
    """A workload, and numbers of processes."""

    name: str
    workload: Workload
    workers: int
    replicas: int

    def predict(self, real: dict[str, float], foreign: float, costs: Costs) -> ScaleResult:
        """Predict a run from the tokens of its prompts and answers, and from the share of the cores that others had."""
        episodes = self.workload.episodes
        num_prompt_tokens = round(real["prompt_tokens"] / len(episodes))
        answers = real["tokens"] - real["sampled"] - real["prompt_tokens"]
        num_observation_tokens = round(answers / max(1, self.workload.num_turns - len(episodes)))

        def draw(_rng: random.Random, number: int) -> TraceTrajectory:
            turns = tuple(
                TraceTurn(
                    num_new_tokens=turn.num_tokens, tool_s=turn.tool_s, num_observation_tokens=num_observation_tokens
                )
                for turn in episodes[number]
            )
            return TraceTrajectory(trajectory_id=str(number), num_prompt_tokens=num_prompt_tokens, turns=turns)

        run = Run(
            num_workers=self.workers,
            num_replicas=self.replicas,
            make_episode=draw,
            num_episodes=len(episodes),
            max_in_flight=len(episodes),
            engine=self.workload.seconds_per_token,
            cores=os.cpu_count(),
            others=foreign * (os.cpu_count() or 1),
            latency_s=2e-4,
        )
        return simulate(run, costs)
