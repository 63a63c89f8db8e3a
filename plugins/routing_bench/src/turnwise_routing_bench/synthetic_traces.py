"""Synthetic traces for the routing simulator: each has one difficulty for a router, and one has none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import evolve, frozen

from turnwise_routing_bench.traces import ReplicaEvent, Trace, TraceTrajectory, TraceTurn

_ARRIVALS_S: Final = 12.0


@frozen
class Shape:
    """
    Recipe of a synthetic trace.

    Attributes:
        draw: returns trajectory `index` of `total`.
        events: changes of replicas during the trace.
    """

    draw: Callable[[random.Random, int, int], TraceTrajectory]
    events: tuple[ReplicaEvent, ...] = ()


def synthetic_traces(seed: int, num_replicas: int, per_replica: int = 96) -> list[Trace]:
    """
    Return one trace per entry of `SHAPES`.

    Args:
        seed: the same seed gives the same traces.
        num_replicas: number of replicas that the traces are meant for.
        per_replica: trajectories per replica; the default is 1.5 times the requests that a replica runs at once.
    """
    total = num_replicas * per_replica
    traces = []
    for name, shape in SHAPES.items():
        rng = random.Random(f"{name} {seed}")
        drawn = tuple(shape.draw(rng, index, total) for index in range(total))
        traces.append(Trace(name=name, trajectories=drawn, events=shape.events))
    return traces


def _turns(rng: random.Random, num_turns: int, mean_tokens: int, tool_s: float = 0.05) -> tuple[TraceTurn, ...]:
    """Draw turns whose lengths are within 30 % of a mean; no tool call follows the last one."""
    lengths = [max(1, round(mean_tokens * rng.uniform(0.7, 1.3))) for _ in range(num_turns)]
    between = [TraceTurn(num_new_tokens=n, tool_s=tool_s, num_observation_tokens=50) for n in lengths[:-1]]
    return (*between, TraceTurn(num_new_tokens=lengths[-1]))


def _mixed_turns(rng: random.Random) -> tuple[TraceTurn, ...]:
    return _turns(rng, 8, 400) if rng.random() < 0.1 else _turns(rng, 3, 150)


def _trajectory(index: int, num_prompt_tokens: int, turns: tuple[TraceTurn, ...], **more: Any) -> TraceTrajectory:
    return TraceTrajectory(trajectory_id=f"t{index}", num_prompt_tokens=num_prompt_tokens, turns=turns, **more)


def _uniform(rng: random.Random, index: int, _total: int) -> TraceTrajectory:
    return _trajectory(index, 500, _turns(rng, 4, 200))


def _skewed_lengths(rng: random.Random, index: int, _total: int) -> TraceTrajectory:
    """90 % have 2 turns of 60 tokens, 10 % have 8 turns of 400 tokens: a factor of 27."""
    return _trajectory(index, 215, _turns(rng, 8, 400) if rng.random() < 0.1 else _turns(rng, 2, 60))


def _slow_tools(rng: random.Random, index: int, _total: int) -> TraceTrajectory:
    """Tool latency is log-normal with a median of 1 s, clipped at 30 s."""
    turns = [
        evolve(turn, tool_s=min(30.0, math.exp(rng.gauss(0, 1.2))) if turn.tool_s else 0.0)
        for turn in _turns(rng, 4, 200)
    ]
    return _trajectory(index, 500, tuple(turns))


def _shared_prompts(rng: random.Random, index: int, _total: int) -> TraceTrajectory:
    """Groups of 16 with one prompt of 4,000 to 12,000 tokens each."""
    group = index // 16
    num_prompt_tokens = 4000 + (group * 2677) % 8001
    return _trajectory(index, num_prompt_tokens, _turns(rng, 3, 150), group_id=f"g{group}")


def _bursts(rng: random.Random, index: int, total: int) -> TraceTrajectory:
    """Eight bursts, 6 s apart, of mixed prompts and lengths."""
    return _trajectory(index, rng.randint(200, 2000), _mixed_turns(rng), arrival_s=index * 8 // total * 6.0)


def _steady_mixed(rng: random.Random, index: int, total: int) -> TraceTrajectory:
    return _trajectory(index, 500, _mixed_turns(rng), arrival_s=_ARRIVALS_S * index / total)


def _steady(rng: random.Random, index: int, total: int) -> TraceTrajectory:
    return _trajectory(index, 500, _turns(rng, 5, 200), arrival_s=_ARRIVALS_S * index / total)


SHAPES: Final[Mapping[str, Shape]] = {
    "uniform": Shape(_uniform),
    "skewed_lengths": Shape(_skewed_lengths),
    "slow_tools": Shape(_slow_tools),
    "shared_prompts": Shape(_shared_prompts),
    "bursts": Shape(_bursts),
    "slow_replica": Shape(_steady_mixed, (ReplicaEvent(at_s=0.0, replica=0, speed=0.4),)),
    "replica_leaves": Shape(
        _steady,
        (ReplicaEvent(at_s=8.0, replica=1, available=False), ReplicaEvent(at_s=20.0, replica=1)),
    ),
}
"""The synthetic traces by name."""
