"""
A plugin for the tests of open columns: an engine that gives two columns, and rewards that fill a third.

Values follow from a token and its place alone, so a test can say which ones each token has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import evolve, frozen

from turnwise import (
    Agent,
    ColumnSpec,
    Engine,
    Episode,
    GenerateRequest,
    GenerateResult,
    NoConfig,
    Registry,
    Resources,
    Reward,
    Score,
    TrajectoryScore,
    hookimpl,
)
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine

END = 258
TOP_K = ColumnSpec(name="top_k", dtype="int32", shape=(3,), fill=-1)
ROUTES = ColumnSpec(name="routes", dtype="int16", shape=(2, 2), fill=-1, tokens="all")
TEACHER = ColumnSpec(name="teacher", dtype="float32", fill=float("nan"), tokens="none")

SPECS: tuple[ColumnSpec, ...] = ()
"""Columns to declare in place of these three, if any."""


def top_k(ids: np.ndarray) -> np.ndarray:
    """Return (n, 3) values of ids."""
    return np.asarray(ids)[:, None] * 7 + np.arange(3)


def routes(ids: np.ndarray) -> np.ndarray:
    """Return (n, 2, 2) values of ids, for each token of a context."""
    return (np.asarray(ids)[:, None, None] + np.arange(4).reshape(2, 2)) % 1000


def teacher(ids: np.ndarray) -> np.ndarray:
    """Return (n,) values of ids."""
    return np.asarray(ids, np.float32) / -8


@frozen
class Options:
    """
    Options of the engine.

    Attributes:
        gives: the columns that it returns.
        token_latency_s: seconds for each token.
    """

    gives: tuple[str, ...] = ("top_k", "routes")
    token_latency_s: float = 0.0


class ColumnEngine(ScriptedEngine):
    """The scripted engine, with columns."""

    def __init__(self, options: Options, _resources: Resources) -> None:
        policy = RandomPolicy(seed=3, vocab_size=120, end_token_id=END, mean_tokens=9)
        super().__init__(policy=policy, token_latency_s=options.token_latency_s, record=False)
        self._gives = options.gives

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        whole = np.concatenate([request.token_ids, result.token_ids])
        values: dict[str, Any] = {"top_k": top_k(result.token_ids), "routes": routes(whole)}
        values |= {name: np.zeros(len(result.token_ids)) for name in ("teacher", "unknown")}
        return evolve(result, columns={name: values[name] for name in self._gives} or None)


class Wanders:
    """Samples turns, also in two paths and in a branched record; the last request of each record holds all of it."""

    def __init__(self, _config: NoConfig, resources: Resources) -> None:
        assert resources.chat is not None
        self._chat = resources.chat

    async def step(self, episode: Episode) -> str:
        record = episode.begin(self._chat.prompt(episode.messages))
        await episode.generate(max_tokens=5)
        episode.observe(np.array([11, 12], np.int32))
        mark = record.mark()
        await episode.generate(max_tokens=4, drop_stops=True)
        paths = record.fork(2)
        for number, path in enumerate(paths):
            episode.force(np.array([20 + number], np.int32), record=path)
            await episode.generate(max_tokens=3, record=path)
        record.join(paths)
        episode.observe(np.array([30], np.int32))
        await episode.generate(max_tokens=6)
        branch = episode.branch(record, mark)
        await episode.generate(max_tokens=5, record=branch)
        return "terminated"


class Teacher:
    """Scores 1, and fills the column `teacher` of every record."""

    def score(self, episode: Episode) -> list[Score]:
        return [
            TrajectoryScore(value=1.0, columns={"teacher": teacher(record.response_ids)})
            for record in episode.trajectories
        ]


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Register the engine `with_columns`."""
    registry.add("with_columns", ColumnEngine, config=Options, reads_weights=False)


@hookimpl
def register_agents(registry: Registry[Agent]) -> None:
    """Register the agent `wanders`."""
    registry.add("wanders", Wanders)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Register the reward `teacher`."""
    registry.add("teacher", lambda _config, _resources: Teacher())


@hookimpl
def register_columns(registry: Registry[ColumnSpec]) -> None:
    """Declare the columns."""
    for spec in SPECS or (TOP_K, ROUTES, TEACHER):
        registry.add(spec.name, lambda _config, _resources, spec=spec: spec, config=NoConfig)
