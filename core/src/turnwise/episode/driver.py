"""
Drives one episode from its task to its result: steps the agent, classifies how it ended, scores and checks it.

Nothing that goes wrong inside an episode leaves this module as an exception: it becomes a status, and for failures a
`Fault` that says whose it was. Only cancelling `run_episode` itself is passed on.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from contextlib import AsyncExitStack

import numpy as np
import structlog
from attrs import evolve, frozen

from turnwise.checkpoint import begin_step, restore, suspended
from turnwise.episode import LiveEpisode
from turnwise.episode_spec import UnfinishedEpisode
from turnwise.errors import (
    BoundaryError,
    BudgetExhausted,
    DataError,
    DeadlineExceeded,
    EpisodeAborted,
    EpisodeEnd,
    Owner,
    boundary,
)
from turnwise.invariants import check_sampled, check_trajectory
from turnwise.observer import EpisodeStarted, RewardFinished, unix_s
from turnwise.protocols import Agent, Reward
from turnwise.record import Origin
from turnwise.result import EpisodeResult, token_scores, total_score
from turnwise.tools import ToolBox
from turnwise.trajectory import Trajectory
from turnwise.types import (
    EpisodeMetrics,
    Fault,
    FinishReason,
    Score,
    State,
    Status,
    TokenScore,
    TrajectoryScore,
    TurnScore,
)

_SCORED = frozenset({Status.COMPLETED, Status.TRUNCATED, Status.TIMED_OUT})
_MAX_TRACEBACK_LINES = 40


@frozen
class Ending:
    """How an episode ended, before it is scored."""

    status: Status
    fault: Fault | None = None


@frozen(kw_only=True)
class Recipe:
    """
    What drives an episode besides its services.

    Attributes:
        agent: steps it.
        reward: scores it; None leaves it unscored.
        tools: what the model may call.
        check_invariants: check every record before it leaves.
    """

    agent: Agent
    reward: Reward | None = None
    tools: ToolBox | None = None
    check_invariants: bool = True


async def run_episode(episode: LiveEpisode, recipe: Recipe) -> EpisodeResult:
    """Run an episode to its end and return what it left, of whatever status."""
    started = time.perf_counter()
    restore(episode)
    observers = episode.services.observers
    if observers.heard("on_episode_started"):
        event = EpisodeStarted(
            uid=episode.uid,
            task=episode.task,
            agent_name=episode.spec.agent_name,
            key=episode.key,
            global_step=episode.global_step,
            validation=episode.validation,
            worker=episode.services.worker,
            started_at=unix_s(started),
        )
        observers.emit("on_episode_started", event)
    ending, unfinished = await _drive(episode, recipe)
    for trajectory in episode.trajectories:
        trajectory.close()
    if recipe.check_invariants:
        ending = _checked(episode, ending)
    spent_s = episode.spec.unfinished.spent_s if episode.spec.unfinished else 0.0
    scoring_started = time.perf_counter()
    ending, scores = await _score(episode, recipe.reward, ending)
    ended = time.perf_counter()
    result = EpisodeResult(
        task=episode.task,
        rollout_n=episode.rollout_n,
        global_step=episode.global_step,
        validation=episode.validation,
        agent_name=episode.spec.agent_name,
        status=ending.status,
        fault=ending.fault,
        trajectories=tuple(episode.trajectories),
        scores=scores,
        messages=tuple(episode.messages),
        objective=episode.objective,
        metrics=_metrics(episode, total_s=spent_s + ended - started, reward_s=ended - scoring_started),
        unfinished=unfinished and evolve(unfinished, spent_s=spent_s + ended - started),
    )
    observers.emit("on_episode_finished", result)
    return result


async def _drive(episode: LiveEpisode, recipe: Recipe) -> tuple[Ending, UnfinishedEpisode | None]:
    """Step the agent to its end, with the tool sessions open, and say how it ended and what to go on from."""
    ending: Ending | None = None
    unfinished: UnfinishedEpisode | None = None
    notes = episode.spec.unfinished.tool_notes if episode.spec.unfinished else {}
    try:
        async with asyncio.timeout(None) as cleanup, AsyncExitStack() as stack:
            stack.push_async_callback(_release_interaction, episode)
            if recipe.tools is not None:
                episode.tools = await stack.enter_async_context(recipe.tools.session(episode.task, notes))
            ending = await _step_to_the_end(episode, recipe.agent)
            cleanup.reschedule(asyncio.get_running_loop().time() + episode.limits.tool_call_s)
            if ending.status is Status.ABORTED:
                unfinished = await suspended(episode)
    except Exception as error:  # noqa: BLE001 - a plugin that fails to release must not take the result with it
        ending = ending or ending_of(error, episode)
        structlog.get_logger().warning("release failed", episode=episode.uid, error=repr(error))
    if ending.status is not Status.ABORTED:
        return ending, None
    unfinished = unfinished or episode.journal.cut(episode.spec, episode.trajectories)
    return ending, evolve(unfinished, released_reward=_released_reward(episode))


def _released_reward(episode: LiveEpisode) -> float:
    """Return what tool sessions gave when they were released, in this part of the episode and those before."""
    earlier = episode.spec.unfinished.released_reward if episode.spec.unfinished else 0.0
    return earlier + (episode.tools.released_reward if episode.tools else 0.0)


async def _step_to_the_end(episode: LiveEpisode, agent: Agent) -> Ending:
    try:
        async with asyncio.timeout(None) as timeout:
            with episode.deadlines(timeout), boundary("agent", f"agent {episode.spec.agent_name!r}"):
                await _step(episode, agent)
    except TimeoutError:
        # Only the timer itself raises it here: what plugins raise has become a BoundaryError.
        return ending_of(episode.why_stopped(), episode)
    except Exception as error:  # noqa: BLE001 - classified, and kept in the result
        return ending_of(error, episode)
    cut = episode.last_finish is FinishReason.LENGTH
    return Ending(Status.TRUNCATED if cut else Status.COMPLETED)


async def _step(episode: LiveEpisode, agent: Agent) -> None:
    for _ in range(episode.journal.num_steps, episode.limits.max_steps):
        begin_step(episode)
        state = await agent.step(episode)
        if not isinstance(state, str) or not state:
            raise TypeError(f"step returned {state!r} in state {episode.state!r}, expected a state name")
        episode.state = state
        if state == State.TERMINATED:
            return
    raise RuntimeError(f"not terminated after {episode.limits.max_steps} steps, last state {episode.state!r}")


def ending_of(error: BaseException, episode: LiveEpisode) -> Ending:
    """Classify what ended an episode; in a group of exceptions a real failure outweighs a signal."""
    error = _most_serious(error)
    if isinstance(error, BoundaryError) and isinstance(error.cause, BaseExceptionGroup):
        error = _most_serious(error.cause, error.owner)
    if isinstance(error, BudgetExhausted):
        return Ending(Status.TRUNCATED)
    if isinstance(error, DeadlineExceeded):
        return Ending(Status.TIMED_OUT, _fault(episode.activity, error))
    if isinstance(error, EpisodeAborted):
        return Ending(Status.ABORTED, _fault("infra", error))
    if isinstance(error, BoundaryError):
        owner = "data" if isinstance(error.cause, DataError) else error.owner
        return Ending(Status.FAILED, _fault(owner, error.cause))
    return Ending(Status.FAILED, _fault("agent", error))


def _most_serious(error: BaseException, owner: Owner = "agent") -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_most_serious(leaf, owner) for leaf in error.exceptions]
    failures = [leaf for leaf in leaves if not isinstance(leaf, EpisodeEnd)]
    first = (failures or leaves)[0]
    return first if isinstance(first, EpisodeEnd | BoundaryError) else BoundaryError(owner, "agent", first)


def _fault(owner: Owner, error: BaseException) -> Fault:
    lines = [line for entry in traceback.format_exception(error) for line in entry.splitlines()]
    shown = "" if isinstance(error, EpisodeEnd) else "\n".join(lines[-_MAX_TRACEBACK_LINES:])
    message = " ".join(str(error).split()) or type(error).__name__
    return Fault(owner=owner, kind=type(error).__name__, message=message, traceback=shown)


async def _release_interaction(episode: LiveEpisode) -> None:
    interaction = episode.services.interaction
    if interaction is not None and episode.interaction_open:
        await interaction.release(episode.interaction_session)


def _checked(episode: LiveEpisode, ending: Ending) -> Ending:
    try:
        for trajectory, sampled in zip(episode.trajectories, episode.sampled, strict=True):
            check_trajectory(trajectory)
            check_sampled(trajectory, sampled)
    except Exception as error:  # noqa: BLE001 - a broken record is a failed episode, never a lost batch
        return Ending(Status.FAILED, _fault("agent", error))
    return ending


async def _score(episode: LiveEpisode, reward: Reward | None, ending: Ending) -> tuple[Ending, tuple[Score, ...]]:
    if reward is None or ending.status not in _SCORED or not episode.trajectories:
        return ending, ()
    started = time.perf_counter()
    name = f"reward {type(reward).__name__}"
    try:
        async with asyncio.timeout(episode.limits.reward_s):
            with boundary("reward", name):
                scores = await _ask_reward(episode, reward)
    except TimeoutError:
        late = TimeoutError(f"{name} took longer than {episode.limits.reward_s:g} s")
        return Ending(Status.FAILED, _fault("reward", late)), ()
    except BoundaryError as error:
        return Ending(Status.FAILED, _fault(error.owner, error.cause)), ()
    total = sum(map(total_score, scores))
    services = episode.services
    if services.observers.heard("on_reward_finished"):
        event = RewardFinished(
            uid=episode.uid,
            reward=total,
            seconds=time.perf_counter() - started,
            key=episode.key,
            worker=services.worker,
            started_at=unix_s(started),
        )
        services.observers.emit("on_reward_finished", event)
    return ending, scores


async def _ask_reward(episode: LiveEpisode, reward: Reward) -> tuple[Score, ...]:
    answer = reward.score(episode)
    if inspect.isawaitable(answer):
        answer = await answer
    scores = tuple(answer) if isinstance(answer, list | tuple) else (answer,)
    scores = tuple(TrajectoryScore(value=float(s)) if isinstance(s, int | float) else s for s in scores)
    _refuse_bad_scores(scores, episode.trajectories)
    return scores


def _refuse_bad_scores(scores: tuple[Score, ...], trajectories: list[Trajectory]) -> None:
    wrong = [s for s in scores if not isinstance(s, TrajectoryScore | TurnScore | TokenScore)]
    if wrong:
        raise TypeError(f"score returned {wrong[0]!r}, expected a TrajectoryScore, TurnScore or TokenScore")
    if len(scores) != len(trajectories):
        raise ValueError(f"{len(scores)} scores for {len(trajectories)} trajectories")
    for score, trajectory in zip(scores, trajectories, strict=True):
        if not (math.isfinite(total_score(score)) and np.isfinite(token_scores(score, trajectory)).all()):
            raise ValueError(f"score is not finite: {total_score(score)}")


def _metrics(episode: LiveEpisode, *, total_s: float, reward_s: float) -> EpisodeMetrics:
    counters = episode.counters
    num_tokens = dict.fromkeys((origin.name.lower() for origin in Origin), 0)
    for trajectory in episode.trajectories:
        num_tokens["prompt"] += trajectory.num_prompt_tokens
        for segment in trajectory.segments:
            num_tokens[segment.origin.name.lower()] += segment.stop - segment.start
    response = sum(num_tokens.values()) - num_tokens["prompt"]
    return EpisodeMetrics(
        total_s=total_s,
        llm_s=counters.llm_s,
        tool_s=counters.tool_s,
        reward_s=reward_s,
        num_turns=counters.num_turns,
        num_tool_calls=counters.num_tool_calls,
        num_tool_errors=counters.num_tool_errors,
        num_tokens=num_tokens,
        mask_ratio=num_tokens["action"] / response if response else 0.0,
        tool_reward=counters.tool_reward + _released_reward(episode),
        num_cached_tokens=counters.num_cached_tokens,
        extra=dict(counters.extra),
    )
