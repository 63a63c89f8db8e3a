"""A worker: one result for each spec, also for a spec that it cannot run."""

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
import structlog
from attrs import define, field
from structlog.testing import capture_logs

from turnwise import EpisodeResult, Observer, State, Status, Task
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.errors import InfrastructureError, LostResourceError, PluginError
from turnwise.events.dispatch import Observers
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.worker import Worker, WorkerComponents
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine


class OneTurn:
    """Samples one turn."""

    async def step(self, episode):
        episode.begin(np.array([1, 2, 3]))
        await episode.generate()
        return State.TERMINATED


@define
class LazyPrograms(Mapping):
    """Builds an agent when its program is looked up, as a run does; `broken` raises `error`."""

    error: BaseException
    lookups: int = 0

    def __getitem__(self, name):
        self.lookups += 1
        if name == "broken":
            raise self.error
        return EpisodeProgram(agent=OneTurn())

    def __iter__(self):
        return iter(("works", "broken"))

    def __len__(self):
        return 2


@define
class Statuses(Observer):
    """Keeps the status of each finished episode, and why each other one runs again."""

    found: list[Status] = field(factory=list)
    retried: list[str] = field(factory=list)

    def on_episode_finished(self, event):
        self.found.append(event.status)

    def on_episodes_retried(self, event):
        self.retried.append((event.count, event.worker, event.reason))


def run_all(agents, programs, observer, tries=1, begin=None) -> dict[int, EpisodeResult]:
    """Run an episode of each agent in one worker, one after the other, and return the results by number."""
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, mean_tokens=2, end_token_id=255))
    parts = WorkerComponents(
        engine=engine,
        programs=programs,
        limits=Limits(),
        stop_token_ids=(255,),
        observers=Observers.of([observer]),
        max_in_flight=1,
    )
    results: dict[int, EpisodeResult] = {}
    specs = [
        EpisodeSpec(
            task=Task(messages=({"role": "user", "content": "hi"},), uid=f"t{number}"), agent_name=agent, tries=tries
        )
        for number, agent in enumerate(agents)
    ]

    async def run() -> None:
        await engine.start()
        worker = Worker(parts, "worker 3")
        if begin is not None:
            begin(worker)
        await worker.run(EpisodeFeed.of(specs), results.__setitem__)

    asyncio.run(run())
    return results


@pytest.mark.parametrize(
    ("error", "owner", "message"),
    [
        (PluginError("agents.broken: no licence"), "agent", "worker 3: PluginError: agents.broken: no licence"),
        (InfrastructureError("disk\nis gone"), "infra", "worker 3: InfrastructureError: disk is gone"),
        (SystemExit("bye"), "agent", "worker 3: SystemExit: bye"),
    ],
)
def test_an_agent_that_cannot_be_built_fails_its_own_episodes(error, owner, message):
    """Its episodes fail with the worker's name and the reason, and the worker runs the others."""
    observer = Statuses()
    results = run_all(["works", "broken", "works", "broken"], LazyPrograms(error), observer)

    expected = [Status.COMPLETED, Status.FAILED, Status.COMPLETED, Status.FAILED]
    assert [results[number].status for number in range(4)] == expected == observer.found
    fault = results[1].fault
    assert (fault.owner, fault.kind, fault.message) == (owner, type(error).__name__, message)
    assert (results[1].trajectories, results[1].unfinished) == ((), None)


def test_log_lines_of_plugins_name_their_episode():
    """A line that a tool or an agent logs carries the uid and the key of its episode, and later lines carry neither."""

    class LoggingTurn(OneTurn):
        async def step(self, episode):
            structlog.get_logger().info("step")
            return await super().step(episode)

    programs = {"logs": EpisodeProgram(agent=LoggingTurn())}
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        results = run_all(["logs"] * 3, programs, Statuses())
        structlog.get_logger().info("after")

    *steps, after = lines
    assert {(line["episode"], line["key"]) for line in steps} == {(each.uid, each.key) for each in results.values()}
    assert len(steps) == len({each.key for each in results.values()}) == 3
    assert not {"episode", "key"} & after.keys()


@define
class Losing(OneTurn):
    """Loses something of each episode a number of times; in the last of these it does something first."""

    num_losses: int
    error: type[Exception] = LostResourceError
    do: object = None
    keys: list[str] = field(factory=list)

    async def step(self, episode):
        result = await super().step(episode)
        self.keys.append(episode.key)
        if len(self.keys) <= self.num_losses:
            if self.do is not None and len(self.keys) == self.num_losses:
                self.do()
            raise self.error("its workspace is gone")
        return result


def test_an_episode_that_loses_something_of_its_own_runs_again():
    """From its start and with the same seeds, as another attempt; only its last end is an event."""
    agent, observer = Losing(2), Statuses()
    ((_, result),) = run_all(["a"], {"a": EpisodeProgram(agent=agent)}, observer, tries=3).items()
    ((_, other),) = run_all(["a"], {"a": EpisodeProgram(agent=OneTurn())}, Statuses()).items()

    assert (result.status, result.fault) == (Status.COMPLETED, None)
    assert observer.found == [Status.COMPLETED]
    assert observer.retried == [(1, "", "its workspace is gone")] * 2
    assert result.metrics.extra == {"lost_attempts": 2.0}
    assert len(set(agent.keys)) == 3
    assert result.trajectories[0].input_ids.tolist() == other.trajectories[0].input_ids.tolist()


@pytest.mark.parametrize(
    ("error", "tries", "runs"),
    [(LostResourceError, 3, 3), (LostResourceError, 1, 1), (InfrastructureError, 3, 1), (ValueError, 3, 1)],
)
def test_the_last_try_and_other_faults_are_the_end(error, tries, runs):
    """A loss is the infrastructure's, and never a score; no other fault runs an episode again."""
    agent, observer = Losing(9, error), Statuses()
    ((_, result),) = run_all(["a"], {"a": EpisodeProgram(agent=agent)}, observer, tries=tries).items()

    assert (result.status, result.scores) == (Status.FAILED, ())
    assert (result.fault.owner, result.fault.kind) == ("agent" if error is ValueError else "infra", error.__name__)
    assert (len(agent.keys), observer.found) == (runs, [Status.FAILED])


def test_a_run_that_stops_runs_nothing_again():
    """The episode is delivered as one that has not started, so that it can be resumed."""
    workers = []
    agent = Losing(1, do=lambda: workers[0].abort())
    ((_, result),) = run_all(["a"], {"a": EpisodeProgram(agent=agent)}, Statuses(), 3, begin=workers.append).items()

    assert result.status is Status.ABORTED
    assert result.unfinished is not None
    assert len(agent.keys) == 1
