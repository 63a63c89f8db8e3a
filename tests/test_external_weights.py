"""Weight updates while outside agents run: versions of tokens, batches of one version, and bounded staleness."""

import threading
from contextlib import contextmanager

import external_agents
import numpy as np
import pytest
from ray_runs import wait_until

from turnwise import Status, Task
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.record.invariants import check_trajectory
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise_gateway import make_external
from turnwise_gateway.config import ExternalConfig
from turnwise_reported_reward import ReportedReward
from turnwise_rollout_buffer import GroupProducer, TaskStream, TrajectoryBuffer
from turnwise_testing.probes.agent import AgentProbe, probe_chat, probe_resources

GROUP_SIZE = 2


@contextmanager
def running(*, token_latency_s=0.0):
    """A manager whose episodes are run by an outside function; yields it and its engine."""
    engine = AgentProbe(make_agent=lambda: None).engine(token_latency_s=token_latency_s)
    agent = make_external(ExternalConfig(function="external_agents:ask_thrice"), probe_resources())
    parts = WorkerComponents(
        engine=engine,
        programs={"external": EpisodeProgram(agent=agent, reward=ReportedReward())},
        limits=Limits(prompt_length=1 << 14, response_length=1 << 14),
        stop_token_ids=probe_chat().stop_token_ids,
    )
    plan = RolloutPlan(default_agent="external", agents={"external": None}, n=GROUP_SIZE)
    with RolloutManager(LocalRuntime(engine, parts), plan) as manager:
        yield manager, engine


def make_tasks(count):
    return [Task(messages=({"role": "user", "content": f"Question {n}?"},), uid=f"t{n}") for n in range(count)]


def update(manager):
    manager.update_weights({"weight": np.zeros(1, np.float32)})


def versions_of(result):
    """Return the weight versions of the tokens that an episode trains."""
    found = set()
    for record in result.trajectories:
        check_trajectory(record)
        claimed = np.broadcast_to(record.weight_versions, record.response_mask.shape)
        found |= set(claimed[record.response_mask == 1].tolist())
    return found


@pytest.mark.slow
def test_an_update_in_mid_call_ends_no_call():
    """The turn in flight has tokens of both versions, its call succeeds, and the buffer counts the older version."""
    with running(token_latency_s=0.01) as (manager, engine):
        results = []
        rolling = threading.Thread(target=lambda: results.extend(manager.rollout(make_tasks(1))))
        rolling.start()
        wait_until(lambda: engine.stats()["num_running"] == GROUP_SIZE, "no call is being sampled")
        update(manager)
        rolling.join()

    assert {Status.COMPLETED} == {result.status for result in results}
    (record,) = results[0].trajectories
    assert 3 == len(record.turns())
    assert {0, 1} == versions_of(results[0])
    assert sorted(record.weight_versions[record.response_mask == 1]) == list(
        record.weight_versions[record.response_mask == 1]
    )
    for max_staleness, kept in ((0, 0), (1, 1)):
        buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=2, max_staleness=max_staleness)
        buffer.set_version(1)
        for result in results:
            buffer.put(result)
        assert (kept, 1 - kept) == (buffer.qsize(), buffer.counts["dropped_stale"])


def test_a_batch_in_step_has_one_version():
    """Sync: an update between two batches leaves every batch with the tokens of one version."""
    with running(token_latency_s=0.001) as (manager, _engine):
        for version in (1, 2, 3):
            update(manager)
            results = manager.rollout(make_tasks(4), global_step=version)
            assert {version} == set().union(*map(versions_of, results))
            assert {1.0} == {result.reward for result in results}


def test_a_group_that_its_agent_holds_is_dropped():
    """An agent that waits while the trainer makes three updates leaves a group that is three versions old."""
    external_agents.CALLED.clear()
    external_agents.MAY_GO_ON.clear()
    with running() as (manager, _engine):
        results = []
        task = Task(messages=({"role": "user", "content": "Question?"},), uid="held")
        rolling = threading.Thread(target=lambda: results.extend(manager.rollout([task])))
        rolling.start()
        assert external_agents.CALLED.wait(60)
        for _ in range(3):
            update(manager)
        external_agents.MAY_GO_ON.set()
        rolling.join()

    assert {0, 3} == set().union(*map(versions_of, results))
    for max_staleness, kept in ((2, 0), (3, 1)):
        buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=2, max_staleness=max_staleness)
        buffer.set_version(3)
        for result in results:
            buffer.put(result)
        assert (kept, 1 - kept) == (buffer.qsize(), buffer.counts["dropped_stale"])


@pytest.mark.slow
@pytest.mark.parametrize(("max_staleness", "longest_s", "num_steps"), [(0, 0.1, 8), (2, 0.1, 8), (2, 30.0, 4)])
def test_no_group_is_older_than_the_bound(max_staleness, longest_s, num_steps, monkeypatch):
    """Async: with agents that wait between their calls, no group that is taken is more versions behind than allowed."""
    stale = []
    monkeypatch.setattr(external_agents, "LONGEST_S", [longest_s])
    with running() as (manager, _engine):
        buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=4, max_staleness=max_staleness)
        stream = TaskStream(make_tasks(40), seed=0)
        producer = GroupProducer(manager, stream, buffer, 4 * (max_staleness + 1), 2, lambda _episode: None)
        producer.start()
        for version in range(1, num_steps + 1):
            for group in buffer.take(2):
                found = set().union(*map(versions_of, group.episodes))
                stale.append(manager.weight_version - min(found))
                assert {1.0} == {episode.reward for episode in group.episodes}
            update(manager)
            buffer.set_version(version)
            producer.notify()
        producer.stop()

    assert 2 * num_steps == len(stale)
    assert max(stale) <= max_staleness
    if max_staleness:
        assert max(stale) > 0  # else the trainer waited for every group, and the bound was not tried
