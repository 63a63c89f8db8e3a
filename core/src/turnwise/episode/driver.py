"""
Drives one episode from its task to its result: steps the agent, classifies the end, checks and scores.

A failure inside an episode never leaves this module as an exception. It becomes a status with a `Fault`, which names
the owner of the failed code. Only the cancellation of `run_episode` itself passes through.
"""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import numpy as np
import structlog
from attrs import evolve, frozen

from turnwise.episode.live import LiveEpisode
from turnwise.errors import (
    BoundaryError,
    BudgetExhausted,
    DataError,
    DeadlineExceeded,
    EpisodeAborted,
    EpisodeEnd,
    Owner,
    boundary,
    text_of,
)
from turnwise.messages import record_metric
from turnwise.protocols import Agent, Chat, CheckedChat, GradingReward, Reward
from turnwise.protocols.chat import COMPARED_METRIC
from turnwise.record.columns import Origin
from turnwise.record.invariants import check_lineage, check_sampled, check_trajectory
from turnwise.record.limit import ReachedLimit
from turnwise.record.result import EpisodeResult, as_score, token_scores, total_score
from turnwise.record.spec import UnfinishedEpisode
from turnwise.record.trajectory import Trajectory
from turnwise.task_tools import read_task_tools
from turnwise.threads import in_thread
from turnwise.tools.toolbox import ToolBox
from turnwise.types import (
    EpisodeMetrics,
    Fault,
    Score,
    State,
    Status,
    ToolSchema,
)

_SCORED = frozenset({Status.COMPLETED, Status.TRUNCATED, Status.TIMED_OUT})
_MAX_TRACEBACK_LINES = 40
LOSSES_METRIC: Final = "lost_attempts"
"""Earlier attempts of an episode, each of which lost its workspace or another resource."""

T = TypeVar("T")


@frozen
class Outcome:
    """Status and fault of an episode, and the limit that ended it."""

    status: Status
    fault: Fault | None = None
    limit: ReachedLimit | None = None


@frozen(kw_only=True)
class EpisodeProgram:
    """
    The plugins that an episode runs.

    Attributes:
        agent: steps the episode.
        reward: scores it; None leaves it unscored.
        tools: tools that the model can call.
        check_invariants: check every record at the end.
        chat: compares some conversations with its renderings; None compares none.
    """

    agent: Agent
    reward: Reward | None = None
    tools: ToolBox | None = None
    check_invariants: bool = True
    chat: Chat | None = None


async def run_episode(episode: LiveEpisode, program: EpisodeProgram) -> EpisodeResult:
    """Run an episode to its end and return its result, whatever its status."""
    started = time.perf_counter()
    record_metric.set(episode.record_metric)
    episode.journal.restore(episode)
    if episode.spec.num_losses:
        episode.record_metric(LOSSES_METRIC, episode.spec.num_losses)
    episode.events.emit_episode_started(started)
    try:
        outcome, unfinished = await _drive(episode, program)
        for record in episode.records.entries:
            record.close()
        if unfinished is None:
            await _check_conversation(episode, program)
        scoring_started = time.perf_counter()
        outcome, scores = await _score(episode, program.reward, outcome)
        ended = time.perf_counter()
    finally:
        await _release_tools(episode)
    # Last, so that no plugin runs between the check and the result.
    if program.check_invariants and (fault := _check_records(episode)):
        outcome, scores = Outcome(Status.FAILED, fault), ()
    # A resumed episode reports the time of all of its parts, and its own scoring alone: earlier parts were not scored.
    total_s = ended - started + (episode.spec.unfinished.spent_s if episode.spec.unfinished else 0.0)
    result = EpisodeResult(
        task=episode.task,
        rollout_n=episode.rollout_n,
        global_step=episode.global_step,
        validation=episode.validation,
        agent_name=episode.spec.agent_name,
        status=outcome.status,
        fault=outcome.fault,
        limit=outcome.limit,
        trajectories=tuple(episode.trajectories),
        scores=scores,
        messages=tuple(episode.messages),
        objective=episode.objective,
        lineage=episode.records.lineage,
        outside_calls=tuple(episode.records.outside_calls),
        reports=tuple(episode.records.reports),
        metrics=_build_metrics(episode, total_s=total_s, reward_s=ended - scoring_started),
        unfinished=unfinished and evolve(unfinished, spent_s=total_s),
        key=episode.key,
        worker=episode.events.worker,
    )
    if episode.spec.after(result.fault) is None:
        episode.events.emit_episode_finished(result)
    return result


async def _drive(episode: LiveEpisode, program: EpisodeProgram) -> tuple[Outcome, UnfinishedEpisode | None]:
    """Step the agent to its end with open sessions; return the outcome, and the saved state of an aborted episode."""
    unfinished: UnfinishedEpisode | None = None
    if program.tools is not None:
        notes = episode.spec.unfinished.tool_notes if episode.spec.unfinished else {}
        episode.tools = program.tools.open_session(episode.task, notes)
    resumable = getattr(program.agent, "resumable", True)
    try:
        outcome = await _step_to_end(episode, program.agent)
        if outcome.status is Status.ABORTED and resumable:
            unfinished = await _close(episode, _suspend(episode), "tool", "suspend")
        if outcome.status not in _SCORED or not isinstance(program.reward, GradingReward):
            await _release_tools(episode)
    finally:
        if episode.user is not None and episode.user.is_open:
            await _close(episode, episode.user.release(), "agent", "release of the interaction")
    if outcome.status is not Status.ABORTED:
        return outcome, None
    if not resumable:
        return outcome, UnfinishedEpisode(spec=evolve(episode.spec, unfinished=None), started=False)
    # After a failure above the state is saved without notes: the episode resumes with new sessions.
    unfinished = unfinished or episode.journal.save(episode)
    return outcome, evolve(unfinished, released_reward=_released_reward(episode))


async def _release_tools(episode: LiveEpisode) -> None:
    """Release the sessions of the tools, if they are open."""
    if episode.tools is not None and episode.tools.is_open:
        await _close(episode, episode.tools.release(), "tool", "release of the tools")


async def _close(episode: LiveEpisode, code: Coroutine[object, None, T], owner: Owner, name: str) -> T | None:
    """Wait for code that closes sessions. A failure is only reported: it must not lose the result."""
    try:
        # The agent has had its time; a session that hangs in suspend or release must not hold the episode's slot.
        return await episode.contain(code, owner, name).wait(episode.limits.tool_call_s)
    except Exception as error:  # noqa: BLE001 - any plugin's error
        structlog.get_logger().warning("release failed", episode=episode.uid, error=repr(error))
        return None


async def _suspend(episode: LiveEpisode) -> UnfinishedEpisode:
    """Suspend the sessions that support it, and return the state to resume from."""
    earlier = episode.spec.unfinished
    # A session that this part did not open keeps the notes of an earlier part.
    tool_notes = dict(earlier.tool_notes) if earlier else {}
    if episode.tools is not None:
        tool_notes |= await episode.tools.suspend()
    interaction_notes = earlier.interaction_notes if earlier else None
    if episode.user is not None:
        interaction_notes = await episode.user.suspend()
    return evolve(episode.journal.save(episode), tool_notes=tool_notes, interaction_notes=interaction_notes)


async def _check_conversation(episode: LiveEpisode, program: EpisodeProgram) -> None:
    """Compare the conversation with the template's rendering, if it is the turn of this episode."""
    chat = program.chat
    if not isinstance(chat, CheckedChat) or not any(each.get("role") == "assistant" for each in episode.messages):
        return
    if COMPARED_METRIC in episode.counters.extra:  # an agent with several conversations has compared them itself
        return
    tools: Sequence[ToolSchema] = () if program.tools is None else program.tools.schemas
    with suppress(DataError):  # of another column of this name, which the agent of this episode does not read
        own = read_task_tools(episode.task)
        tools = tools if own is None else own
    number = episode.task.sample_index + episode.rollout_n
    # In a thread: it renders a conversation several times.
    found = await in_thread(partial(chat.check_conversation, number, tuple(episode.messages), tools), {})
    for name, value in found.items():
        episode.record_metric(name, value)


def _released_reward(episode: LiveEpisode) -> float:
    """Return the rewards of released tool sessions, earlier parts included."""
    earlier = episode.spec.unfinished.released_reward if episode.spec.unfinished else 0.0
    return earlier + (episode.tools.released_reward if episode.tools else 0.0)


async def _step_to_end(episode: LiveEpisode, agent: Agent) -> Outcome:
    try:
        name = f"agent {episode.spec.agent_name!r}"
        await episode.timer.run(episode.contain(_step(episode, agent), "agent", name, nests=True))
    except TimeoutError:  # the timer has cancelled the agent: a TimeoutError of a plugin has become a BoundaryError
        return _classify(episode.timer.stop_signal(), episode.timer.activity)
    except Exception as error:  # noqa: BLE001 - classified, and kept in the result
        outcome = _classify(error, episode.timer.activity)
        if episode.timer.aborting and outcome.fault is not None and outcome.fault.owner == "infra":
            # A stop that cuts something short, such as the start of a workspace, causes no failure.
            outcome = _classify(episode.timer.stop_signal(), episode.timer.activity)
        return evolve(outcome, limit=_complete_limit(outcome.limit, episode)) if outcome.limit else outcome
    if episode.counters.num_endings:  # an agent that bounds its requests may have cut the turn that called the tool
        return Outcome(Status.COMPLETED)
    truncated = episode.last_finish is not None and episode.last_finish.is_cut
    return Outcome(Status.TRUNCATED if truncated else Status.COMPLETED, limit=episode.reached)


def _complete_limit(limit: ReachedLimit, episode: LiveEpisode) -> ReachedLimit:
    """Return the limit that ended an episode; an agent that raises `BudgetExhausted` itself need not name it."""
    if limit.name or not episode.records.entries:
        return limit
    room = episode.records.find_room(episode.trajectory)
    return evolve(limit, name=room.limit, value=room.value)


async def _step(episode: LiveEpisode, agent: Agent) -> None:
    # Steps of earlier parts count, so that an agent that never ends stops however often it is interrupted.
    for _ in range(episode.journal.num_steps, episode.limits.max_steps):
        episode.journal.start_step(episode)
        state = await agent.step(episode)
        if not isinstance(state, str) or not state:
            raise TypeError(f"step returned {state!r} in state {episode.state!r}, expected a state name")
        episode.state = state
        if state == State.TERMINATED:
            return
    raise RuntimeError(f"not terminated after {episode.limits.max_steps} steps, last state {episode.state!r}")


def _classify(error: BaseException, activity: Owner) -> Outcome:
    """Return the outcome of an episode that an exception ended, while it waited for code of the owner `activity`."""
    error = _most_serious(error)
    if isinstance(error, BoundaryError) and isinstance(error.cause, BaseExceptionGroup):
        error = _most_serious(error.cause, error.owner)
    if isinstance(error, BudgetExhausted):
        reason = " ".join(str(error).split()) or "no further token fits"
        return Outcome(Status.TRUNCATED, limit=ReachedLimit(name=error.limit, value=error.value, reason=reason))
    if isinstance(error, DeadlineExceeded):
        return Outcome(Status.TIMED_OUT, _fault(activity, error))
    if isinstance(error, EpisodeAborted):
        return Outcome(Status.ABORTED, _fault("infra", error))
    if isinstance(error, BoundaryError):
        # An agent that reads a bad row raises, but the row is to blame, as with a prompt that is too long.
        owner = "data" if isinstance(error.cause, DataError) else error.owner
        return Outcome(Status.FAILED, _fault(owner, error.cause))
    return Outcome(Status.FAILED, _fault("agent", error))


def _most_serious(error: BaseException, owner: Owner = "agent") -> BaseException:
    """Return the exception of a group that decides the outcome: a failure before a signal that ends the episode."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_most_serious(leaf, owner) for leaf in error.exceptions]
    failures = [leaf for leaf in leaves if not isinstance(leaf, EpisodeEnd)]
    first = (failures or leaves)[0]
    return first if isinstance(first, EpisodeEnd | BoundaryError) else BoundaryError(owner, "agent", first)


def _fault(owner: Owner, error: BaseException) -> Fault:
    lines = [line for entry in traceback.format_exception(error) for line in entry.splitlines()]
    shown = "" if isinstance(error, EpisodeEnd) else "\n".join(lines[-_MAX_TRACEBACK_LINES:])
    message = " ".join(text_of(error).split()) or type(error).__name__
    return Fault(owner=owner, kind=type(error).__name__, message=message, traceback=shown)


def _check_records(episode: LiveEpisode) -> Fault | None:
    try:
        for record in episode.records.entries:
            check_trajectory(record.trajectory)
            check_sampled(record.trajectory, record.sampled)
        check_lineage(episode.trajectories, episode.records.lineage)
    except Exception as error:  # noqa: BLE001 - one bad record must not lose the batch
        return _fault("agent", error)
    return None


async def _score(episode: LiveEpisode, reward: Reward | None, outcome: Outcome) -> tuple[Outcome, tuple[Score, ...]]:
    if reward is None or outcome.status not in _SCORED or not episode.trajectories:
        return outcome, ()
    started = time.perf_counter()
    name, seconds = f"reward {type(reward).__name__}", episode.limits.reward_s
    try:
        if isinstance(reward, GradingReward):
            with boundary("reward", name):
                seconds = reward.grading_s(episode.task)
        scores = await episode.contain(_request_scores(episode, reward), "reward", name).wait(seconds)
    except TimeoutError:
        late = TimeoutError(f"{name} took longer than {seconds:g} s")
        return Outcome(Status.FAILED, _fault("reward", late)), ()
    except BoundaryError as error:
        return Outcome(Status.FAILED, _fault(error.owner, error.cause)), ()
    except EpisodeEnd as error:  # the episode has ended; the reward asked it for more
        return Outcome(Status.FAILED, _fault("reward", error)), ()
    if scores:
        episode.events.emit_reward_finished(sum(map(total_score, scores)), started)
    return outcome, scores


async def call_reward(score: Callable[[T], object], argument: T) -> object:
    """Return the answer of a reward."""
    # In a thread unless it is async: a function that blocks must not hold the other episodes.
    answer = score(argument) if inspect.iscoroutinefunction(score) else await in_thread(partial(score, argument), {})
    # Also of partials and callable objects, which `iscoroutinefunction` misses.
    return await answer if inspect.isawaitable(answer) else answer


async def _request_scores(episode: LiveEpisode, reward: Reward) -> tuple[Score, ...]:
    answer = await call_reward(reward.score, episode)
    scores = tuple(map(as_score, answer if isinstance(answer, list | tuple) else (answer,)))
    _check_scores(scores, episode.trajectories)
    return episode.records.take_columns(scores, episode.context.columns)


def _check_scores(scores: tuple[Score, ...], trajectories: list[Trajectory]) -> None:
    if not scores:  # the reward leaves the episode unscored
        return
    if len(scores) != len(trajectories):
        raise ValueError(f"{len(scores)} scores for {len(trajectories)} trajectories")
    for score, trajectory in zip(scores, trajectories, strict=True):
        if not (math.isfinite(total_score(score)) and np.isfinite(token_scores(score, trajectory)).all()):
            raise ValueError(f"score is not finite: {total_score(score)}")


def _build_metrics(episode: LiveEpisode, *, total_s: float, reward_s: float) -> EpisodeMetrics:
    counters = episode.counters
    num_tokens = dict.fromkeys((origin.name.lower() for origin in Origin), 0)
    for trajectory in episode.trajectories:
        num_tokens["prompt"] += trajectory.num_prompt_tokens
        for segment in trajectory.segments:
            num_tokens[segment.origin.name.lower()] += segment.stop - segment.start
    response = sum(num_tokens.values()) - num_tokens["prompt"]
    for name in ("replayed", "constrained"):  # most episodes have no such tokens
        if not num_tokens[name]:
            del num_tokens[name]
    return EpisodeMetrics(
        total_s=total_s,
        llm_s=counters.llm_s,
        tool_s=counters.tool_s,
        reward_s=reward_s,
        num_turns=sum(len(trajectory.turns()) for trajectory in episode.trajectories),
        num_tool_calls=counters.num_tool_calls,
        num_tool_errors=counters.num_tool_errors,
        num_tokens=num_tokens,
        mask_ratio=num_tokens["action"] / response if response else 0.0,
        tool_reward=counters.tool_reward + _released_reward(episode),
        num_cached_tokens=counters.num_cached_tokens,
        replicas=tuple(counters.replicas),
        extra=dict(counters.extra),
    )
