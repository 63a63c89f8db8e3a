"""
Requirements of every observer, as plain functions without pytest.

A check takes an `ObserverProbe` and raises `AssertionError` with a text that describes the failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from attrs import frozen

from turnwise.errors import describe
from turnwise.events import observer as events
from turnwise.events.dispatch import EVENTS, Observers
from turnwise.events.observer import Observer, Place
from turnwise.protocols import Agent
from turnwise.record.result import EpisodeResult
from turnwise.types import FinishReason
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.checks.postprocessor import example_results
from turnwise_testing.probes.agent import AgentProbe, ReplayAgent, make_task, probe_chat
from turnwise_testing.probes.engine import expect, expect_equal


def make_events() -> dict[str, object]:
    """Return an event for each method of an observer, in the order of a run."""
    place: Any = {"uid": "probe-0/0", "key": "k", "worker": "worker 0", "started_at": 1e9}
    return {
        "on_training_started": events.TrainingStarted(folder=Path()),
        "on_run_started": events.RunStarted(num_episodes=8, global_step=1, validation=False),
        "on_episode_started": events.EpisodeStarted(**place, task=make_task(), agent_name="probe"),
        "on_request_routed": events.RequestRouted(trajectory_id="k", replica=0, kind="first", reason="first"),
        "on_turn_finished": events.TurnFinished(
            **place,
            num_context_tokens=20,
            num_new_tokens=5,
            num_cached_tokens=0,
            finish_reason=FinishReason.STOP,
            seconds=0.1,
        ),
        "on_tool_finished": events.ToolFinished(**place, tool="add", seconds=0.1, error=False, num_characters=1),
        "on_reward_finished": events.RewardFinished(**place, reward=1.0, seconds=0.1),
        "on_limit_reached": events.LimitReached(limit="rollout.max_in_flight"),
        "on_actor_restarted": events.ActorRestarted(kind="worker", index=0, reason="killed", restarts=1),
        "on_episodes_retried": events.EpisodesRetried(count=1, worker="worker 0", reason="killed"),
        "on_weights_updated": events.WeightsUpdated(version=1, seconds=0.1),
        "on_memory_switched": events.MemorySwitched(stage="sleep", seconds=0.1),
        "on_run_waiting": events.RunWaiting(seconds=10.0, waits=(events.Wait(part="engine", seconds=10.0),)),
        "on_metrics_logged": events.MetricsLogged(step=1, values={"reward": 0.5}),
        "on_episode_finished": example_results()[0],
    }


@frozen(kw_only=True)
class ObserverProbe:
    """The probe of an observer: `make_observer` builds it, as the registered factory does."""

    make_observer: Callable[[], Observer]


OBSERVER_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
OBSERVERS = PartChecks(
    checks=OBSERVER_CHECKS,
    probe=lambda part: ObserverProbe(make_observer=part.make),
)
_check = register(OBSERVER_CHECKS)


@_check
def check_fulfils_the_protocol(probe: ObserverProbe) -> None:
    """The factory returns a subclass of `Observer` whose `place` is `worker` or `driver`."""
    observer = probe.make_observer()
    expect(isinstance(observer, Observer), f"{type(observer).__name__} is no subclass of turnwise.Observer")
    expect(observer.place in get_args(Place), f"place is {observer.place!r}, expected worker or driver")


@_check
def check_methods_are_called(probe: ObserverProbe) -> None:
    """It overrides the method of an event; the base class refuses misspelt and async ones."""
    kind = type(probe.make_observer())
    heard = [name for name in EVENTS if getattr(kind, name) is not getattr(Observer, name)]
    expect(bool(heard), "it overrides no method of an event")


@_check
def check_every_event_is_understood(probe: ObserverProbe) -> None:
    """No event makes it raise, whatever came before."""
    observer = probe.make_observer()
    observer.open()
    try:
        for name, event in [*make_events().items(), *reversed(make_events().items())]:
            try:
                getattr(observer, name)(event)
            except Exception as error:
                raise AssertionError(f"{name} raised {describe(error)}") from error
    finally:
        observer.close()


@_check
def check_closes_twice(probe: ObserverProbe) -> None:
    """A second `close` does nothing, and an observer that was never opened can be closed."""
    observer = probe.make_observer()
    observer.open()
    observer.close()
    observer.close()
    probe.make_observer().close()


@_check
def check_results_stay_unchanged(probe: ObserverProbe) -> None:
    """An episode has the same record and messages with and without the observer."""
    expect_equal(_observed([probe.make_observer()]), _observed([]), "an observed episode")


def _observed(observers: list[Observer]) -> object:
    dispatcher = Observers.of(observers)
    dispatcher.open()
    try:
        agents = AgentProbe(make_agent=_make_agent)
        result = asyncio.run(agents.run(make_task())).result
        dispatcher.emit("on_episode_finished", result)
    finally:
        dispatcher.close()
    return _plain(result)


def _make_agent() -> Agent:
    return ReplayAgent(probe_chat())


def _plain(result: EpisodeResult) -> object:
    records = [{name: str(value) for name, value in each.to_dict().items()} for each in result.trajectories]
    return records, result.messages, result.scores, str(result.status)
