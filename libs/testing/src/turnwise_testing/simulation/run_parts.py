"""Parts of simulated runs: managers over the local runtime, weights of each version, and outcomes of episodes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from attrs import evolve, field, frozen

from turnwise import EpisodeResult, RolloutManager, SamplingParams, Task
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.protocols import Engine, GroupReward
from turnwise.runtime.groups import GroupScoring
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise.types import Capabilities
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES
from turnwise_testing.simulation.agents import END, MOVES, Count, Length, Wanderer
from turnwise_testing.simulation.tracing import TracingEngine, TracingPolicy, check_episode, digest_of

NAMES: Final = ("embedding", "layer", "head")
"""Of the weights."""


@frozen(kw_only=True)
class RunContent:
    """
    The content of a simulated run; the same for the undisturbed and the disturbed one.

    Attributes:
        tasks: of the run.
        n: episodes of a task.
        num_workers: of the runtime.
        layouts: whether the engine accepts layouts.
        max_in_flight: most episodes of a worker at once.
        policy: samples the tokens; its ids are below its `vocab_size`.
        stop_token_ids: that end a turn.
        response_length: most response tokens of an episode.
        max_tokens: most tokens of a turn.
    """

    tasks: tuple[Task, ...]
    n: int
    num_workers: int
    layouts: bool
    max_in_flight: int
    policy: Any
    stop_token_ids: tuple[int, ...] = (END,)
    response_length: int = 160
    max_tokens: int = 24

    @classmethod
    def draw(cls, rng: random.Random, *, max_tasks: int = 3, max_n: int = 3) -> RunContent:
        """Return random content."""
        moves = tuple(name for name in MOVES if rng.random() < 0.5) or ("turn",)
        names = "abcdefgh"[: rng.randint(1, max_tasks)]
        return cls(
            tasks=tuple(make_task(name, moves, rng.randint(1, 4)) for name in names),
            n=rng.randint(1, max_n),
            num_workers=rng.randint(1, 2),
            layouts=rng.random() < 0.5,
            max_in_flight=rng.choice((1, 2, 256)),
            policy=TracingPolicy(end_token_id=END, mean_tokens=rng.choice((2.0, 6.0, 20.0))),
        )

    @property
    def capabilities(self) -> Capabilities:
        return evolve(SCRIPTED_CAPABILITIES, layouts=self.layouts, vocab_size=self.policy.vocab_size)


def make_task(uid: str, moves: Iterable[str], num_moves: int) -> Task:
    """Return a task of a `Wanderer`."""
    extra = {"moves": list(moves), "num_moves": num_moves}
    return Task(messages=({"role": "user", "content": uid},), uid=uid, extra=extra)


@frozen
class Pace:
    """Random durations in seconds; 0 without faults. `draw` makes a part of a run slow, fast or immediate."""

    rng: random.Random | None
    scale_s: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random | None) -> Pace:
        return cls(rng, rng.choice((0.0, 0.01, 1.0)) if rng else 0.0)

    def __call__(self, *_of: object) -> float:
        return self.rng.random() * self.scale_s if self.rng is not None and self.scale_s else 0.0


@frozen
class Ledger:
    """
    The weights of each version of a run; they depend on the version alone.

    Attributes:
        digests: `digest_of` the weights of each version.
    """

    digests: dict[int, int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.digests[0] = digest_of(self.weights(0))

    def weights(self, version: int) -> dict[str, Any]:
        return weights_of(dict.fromkeys(NAMES, version))

    def next(self, version: int) -> dict[str, Any]:
        """Return the weights of a version, and note their digest."""
        weights = self.weights(version)
        self.digests[version] = digest_of(weights)
        return weights


def weights_of(content: Mapping[str, int]) -> dict[str, Any]:
    """Return (2,) arrays by name for the version of each; their values tell name and version."""
    return {name: np.full(2, version * 31 + NAMES.index(name), np.float32) for name, version in content.items()}


def make_engine(content: RunContent, faults: random.Random | None, ledger: Ledger) -> TracingEngine:
    """Return an engine with the weights of version 0, whose latencies are random when there are faults."""
    return TracingEngine(
        policy=content.policy,
        weights=ledger.weights(0),
        capabilities=content.capabilities,
        latency_s=Pace.draw(faults) if faults else 0.0,
        token_latency_s=Pace.draw(faults) if faults else 0.0,
        update_s=Pace.draw(faults),
        record=False,
    )


def make_program(faults: random.Random | None) -> EpisodeProgram:
    """Return the program of the agent `Wanderer`, with a tool of random latency when there are faults."""
    return EpisodeProgram(agent=Wanderer(), reward=Length(), tools=ToolBox([Count(Pace.draw(faults))]))


def make_manager(
    content: RunContent, engine: Engine, program: EpisodeProgram, *, group_reward: GroupReward | None = None
) -> RolloutManager:
    """Return a manager over the local runtime; start it."""
    dispatcher = Observers.of(())
    plan = RolloutPlan(
        default_agent="simulated",
        agents={"simulated": program},
        n=content.n,
        sampling=SamplingParams(max_tokens=content.max_tokens),
    )
    parts = WorkerComponents(
        engine=engine,
        programs={"simulated": program},
        limits=Limits(response_length=content.response_length, max_steps=50),
        stop_token_ids=content.stop_token_ids,
        observers=dispatcher,
        max_in_flight=content.max_in_flight,
    )
    groups = None
    if group_reward is not None:
        groups = GroupScoring(group_reward, "group reward of the simulation", plan, dispatcher, 5.0)
    return RolloutManager(LocalRuntime(engine, parts, content.num_workers), plan, dispatcher, groups=groups)


@frozen
class EpisodeOutcome:
    """The part of an episode's result that no order of events may change: rows, status and reward."""

    status: str
    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    reward: float | None
    fault: str = ""

    @classmethod
    def of(cls, result: EpisodeResult) -> EpisodeOutcome:
        rows = tuple(
            (tuple(record.input_ids.tolist()), tuple(record.response_mask.tolist())) for record in result.trajectories
        )
        fault = f"{result.fault.owner}: {result.fault.message}" if result.fault else ""
        return cls(str(result.status), rows, result.reward, fault)


def outcomes_of(results: Iterable[EpisodeResult], digests: Mapping[int, int]) -> dict[str, EpisodeOutcome]:
    """Check each episode's records, and that each name comes once; return their outcomes by name."""
    outcomes: dict[str, EpisodeOutcome] = {}
    for result in results:
        check_episode(result, digests)
        if result.uid in outcomes:
            raise AssertionError(f"episode {result.uid} was returned twice")
        outcomes[result.uid] = EpisodeOutcome.of(result)
    return outcomes


def compare_outcomes(undisturbed: Mapping[str, EpisodeOutcome], disturbed: Mapping[str, EpisodeOutcome]) -> None:
    """Raise `AssertionError` unless both runs have the same episodes with the same outcomes."""
    if undisturbed.keys() != disturbed.keys():
        missing, more = undisturbed.keys() - disturbed.keys(), disturbed.keys() - undisturbed.keys()
        raise AssertionError(f"episodes are missing: {sorted(missing)}, or too many: {sorted(more)}")
    for name, wanted in undisturbed.items():
        if (found := disturbed[name]) != wanted:
            raise AssertionError(f"episode {name} depends on the order of events:\n  {wanted}\n  {found}")
