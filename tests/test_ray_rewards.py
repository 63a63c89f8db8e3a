"""Reward workers and a judge's replicas as real Ray actors, with real kills: every episode is scored, and as it was."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ray_judge_blueprint import JudgedBlueprint

from turnwise import Status, Task
from turnwise.config import JudgeConfig
from turnwise.config_parts import Choice
from turnwise.config_runtime import PoolConfig, RayConfig, RuntimeConfig
from turnwise.observer import Observer
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.placement import placement_of_runtime
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime
from turnwise.telemetry import Observers

PLAN = RolloutPlan(default_agent="four", agent_names=frozenset({"four"}))

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray cluster on loopback for all tests of this file."""
    import ray

    here = str(Path(__file__).parent)
    ray.init(include_dashboard=False, num_cpus=8, namespace="turnwise", runtime_env={"env_vars": {"PYTHONPATH": here}})
    yield
    ray.shutdown()


def manager(blueprint, *, reward_workers=2, judges=2, observers=(), **ray_options):
    ray_options = {"backoff_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 2.0} | ray_options
    config = RuntimeConfig(name="ray", reward_workers=reward_workers, ray=RayConfig(**ray_options))
    judge = JudgeConfig(engine=Choice("scripted"), pool=PoolConfig(num_replicas=judges)) if judges else None
    heard = Observers.of(observers)
    runtime = RayRuntime(blueprint, config, heard, placement_of_runtime(config, judge=judge))
    return RolloutManager(runtime, PLAN, heard)


def tasks(count, prefix="task"):
    message = {"role": "user", "content": "x"}
    return [Task(messages=(message,), uid=f"{prefix}{i}", sample_index=i) for i in range(count)]


def pids(seats):
    import ray

    return [int(ray.get(seat.handle.stats.remote())["pid"]) for seat in seats if seat.handle is not None]


def later(delay_s, call):
    timer = threading.Timer(delay_s, call)
    timer.start()
    return timer


def scores_of(results):
    """What must not depend on where an episode was scored."""
    return {r.task.uid: (r.scores, r.metrics.extra, r.trajectories[0].input_ids.tolist()) for r in results}


@pytest.fixture(scope="module")
def undisturbed():
    """What 40 tasks get in one process, where the worker's own loop scores them, and nothing goes wrong."""
    blueprint = JudgedBlueprint()
    engine, judge = blueprint.make_engine(), blueprint.make_judge_engine()
    runtime = LocalRuntime(engine, blueprint.make_parts(engine, judge), judge=judge)
    with RolloutManager(runtime, PLAN) as running:
        return scores_of(running.rollout(tasks(40)))


@pytest.fixture(scope="module")
def heard():
    """Hears scores in the driver."""
    return RewardsHeard()


@pytest.fixture(scope="module")
def running(heard, tmp_path_factory):
    """Two reward workers and two replicas of a judge, for several tests: starting them takes longer than the tests."""
    blueprint = JudgedBlueprint(folder=str(tmp_path_factory.mktemp("rewards")), judge_latency_s=0.01)
    with manager(blueprint, observers=[heard], max_restarts=9, reward_tries=4) as running:
        yield running


class RewardsHeard(Observer):
    """Keeps the scores that are told."""

    def __init__(self):
        self.rewards = []

    def on_reward_finished(self, event):
        """Keep one."""
        self.rewards.append((event.uid, event.reward))


def test_scores_do_not_depend_on_where_they_are_made(undisturbed, running, heard):
    """
    Reward workers that ask replicas of a judge give, bit for bit, what one process gives; the batch has these scores,
    and observers hear them.
    """
    results = running.rollout(tasks(40))
    batch = running.collate(results)

    assert scores_of(results) == undisturbed
    assert all(r.status in {Status.COMPLETED, Status.TRUNCATED} for r in results)
    assert [r.reward for r in results] == batch.rm_scores.sum(1).tolist()
    assert sorted((r.uid, r.reward) for r in results) == sorted(heard.rewards)


def test_killed_reward_workers_and_judges_cost_nothing(undisturbed, running):
    """
    SIGKILL of a reward worker and of a replica of the judge while both work: the scores are the same.
    """
    seats = [running.runtime.rewards.seats[0], running.runtime.pools["judge"].seats[0]]
    for victim in pids(seats):
        later(0.3, lambda pid=victim: os.kill(pid, signal.SIGKILL))

    results = running.rollout(tasks(40))

    assert scores_of(results) == undisturbed
    assert [1, 1] == [seat.restarts for seat in seats]


def test_what_a_reward_does_to_its_worker_stays_with_its_episode(running):
    """
    A reward that kills its process once, or whose service fails once, scores at the next try; one that always kills is
    given up as infrastructure; one that raises fails its own episode with its own error.
    """
    rows = [*tasks(8), *tasks(1, "kills-once"), *tasks(1, "fails-once"), *tasks(1, "always-kills")]
    rows += [*tasks(1, "raises"), *tasks(1, "cancels")]
    results = running.rollout(rows)

    assert [r.task.uid for r in results] == [task.uid for task in rows]
    failed = {r.task.uid: r.fault for r in results if r.status is Status.FAILED}
    assert {"always-kills0", "raises0", "cancels0"} == set(failed)
    assert ("reward", "CancelledError") == (failed["cancels0"].owner, failed["cancels0"].kind)
    killed, raised = failed["always-kills0"], failed["raises0"]
    assert ("infra", "RewardWorkerDiedError") == (killed.owner, killed.kind)
    assert ("reward", "KeyError", "'ground_truth'") == (raised.owner, raised.kind, raised.message)
    assert "ray_judge_blueprint.py" in raised.traceback


def test_a_reward_that_blocks_is_cut_off():
    """
    A score that never returns fails at its deadline; its reward worker is replaced, and the others are scored.
    """
    rows = [*tasks(10), *tasks(1, "blocks")]
    with manager(JudgedBlueprint(blocking=True, reward_s=1.0), judges=0, reward_workers=1) as running:
        results = {r.task.uid: r for r in running.rollout(rows)}

    assert {"blocks0"} == {uid for uid, r in results.items() if r.status is Status.FAILED}
    fault = results["blocks0"].fault
    assert ("reward", "TimeoutError") == (fault.owner, fault.kind)
    assert "reward BlockingReward took longer than 1 s" in fault.message


def test_no_judge_left_is_told():
    """
    When no replica of the judge will come back, episodes fail as infrastructure and keep their records.
    """
    blueprint = JudgedBlueprint(judge_latency_s=0.02)
    with manager(blueprint, reward_workers=0, judges=1, max_restarts=0) as running:
        victim = pids(running.runtime.pools["judge"].seats)[0]
        later(0.3, lambda: os.kill(victim, signal.SIGKILL))
        results = running.rollout(tasks(12))

    failed = [r for r in results if r.status is Status.FAILED]
    assert failed
    assert {"infra"} == {r.fault.owner for r in failed}
    assert all("replicas are dead" in r.fault.message for r in failed)
    assert all(len(r.trajectories[0].turns()) == 4 for r in failed)
