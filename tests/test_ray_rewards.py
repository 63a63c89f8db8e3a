"""Reward workers and a judge's replicas as real Ray actors, with real kills: every episode gets the same score."""

import os
import signal

import pytest
from ray_judge_blueprint import JudgedBlueprint
from ray_runs import FINISHED, ON_RAY, PLAN, kill_busy, make_tasks, pids, rollout_held, wait_until

from turnwise import Status
from turnwise.config.parts import Choice
from turnwise.config.run import JudgeConfig
from turnwise.config.runtime import PoolConfig, RayConfig, RuntimeConfig
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.placement import plan_runtime_placement
from turnwise.runtime.ray.runtime import RayRuntime

pytestmark = [*ON_RAY, pytest.mark.one_part, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def make_manager(blueprint, *, reward_workers=2, judges=2, observers=(), **ray_options):
    ray_options = {"backoff_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 120.0} | ray_options
    config = RuntimeConfig(name="ray", reward_workers=reward_workers, ray=RayConfig(**ray_options))
    judge = JudgeConfig(engine=Choice("scripted"), pool=PoolConfig(num_replicas=judges)) if judges else None
    dispatcher = Observers.of(observers)
    runtime = RayRuntime(blueprint, config, dispatcher, plan_runtime_placement(config, judge=judge))
    return RolloutManager(runtime, PLAN, dispatcher)


def scores_by_task(results):
    """Return the scores, metrics and ids of each episode, which must not depend on the process that scores it."""
    return {r.task.uid: (r.scores, r.metrics.extra, r.trajectories[0].input_ids.tolist()) for r in results}


@pytest.fixture(scope="module")
def undisturbed():
    """The scores of 40 tasks in one process, on the worker's own loop."""
    blueprint = JudgedBlueprint()
    engine, judge = blueprint.make_engine(), blueprint.make_judge_engine()
    runtime = LocalRuntime(engine, blueprint.make_components(engine, judge), judge=judge)
    with RolloutManager(runtime, PLAN) as running:
        return scores_by_task(running.rollout(make_tasks(40)))


@pytest.fixture(scope="module")
def rewards():
    """An observer of the scores in the driver."""
    return RewardObserver()


@pytest.fixture(scope="module")
def running(ray_cluster, rewards, tmp_path_factory):
    """Two reward workers and two replicas of a judge for several tests: starting them takes longer than the tests."""
    folders = {name: str(tmp_path_factory.mktemp("rewards")) for name in ("folder", "judge_folder")}
    blueprint = JudgedBlueprint(**folders, judge_latency_s=0.01)
    with make_manager(blueprint, observers=[rewards], max_restarts=9, reward_tries=4) as manager:
        yield manager


class RewardObserver(Observer):
    """Collects the reported scores."""

    def __init__(self):
        self.rewards = []

    def on_reward_finished(self, event):
        self.rewards.append((event.uid, event.reward))


def test_scores_do_not_depend_on_the_process(undisturbed, running, rewards):
    """
    Reward workers with replicas of a judge give, bit for bit, the scores of one process; the batch has these scores,
    and observers receive them.
    """
    rewards.rewards.clear()
    results = running.rollout(make_tasks(40))
    batch = running.collate(results)

    assert scores_by_task(results) == undisturbed
    assert {r.status for r in results} <= FINISHED
    assert [r.reward for r in results] == batch.rm_scores.sum(1).tolist()
    assert sorted((r.uid, r.reward) for r in results) == sorted(rewards.rewards)


def test_killed_reward_workers_and_judges_cost_nothing(undisturbed, running):
    """
    SIGKILL of a reward worker and of a replica of the judge while both are busy changes no score.
    """
    slots = [running.runtime.rewards.slots[0], running.runtime.pools["judge"].slots[0]]
    reward_worker, starts = pids(slots)[0], [slot.num_starts for slot in slots]

    def kill():
        kill_busy(slots[1])  # only reward workers ask the judge, so they are busy too
        os.kill(reward_worker, signal.SIGKILL)

    results = rollout_held(running, make_tasks(40), kill, running.runtime.blueprint.judge_folder)

    assert scores_by_task(results) == undisturbed
    wait_until(lambda: [slot.num_starts for slot in slots] == [n + 1 for n in starts], "they were not restarted once")


@pytest.mark.slow
def test_a_reward_harms_no_other_episode(running):
    """
    A reward that kills its process once, or whose service fails once, is retried and scores. One that kills every
    process fails as infrastructure. One that raises fails its own episode with its own error.
    """
    tasks = [*make_tasks(8), *make_tasks(1, "kills-once"), *make_tasks(1, "fails-once"), *make_tasks(1, "always-kills")]
    tasks += [*make_tasks(1, "raises"), *make_tasks(1, "cancels")]
    results = running.rollout(tasks)

    assert [r.task.uid for r in results] == [task.uid for task in tasks]
    failed = {r.task.uid: r.fault for r in results if r.status is Status.FAILED}
    assert {"always-kills0", "raises0", "cancels0"} == set(failed)
    assert ("reward", "CancelledError") == (failed["cancels0"].owner, failed["cancels0"].kind)
    killed, raised = failed["always-kills0"], failed["raises0"]
    assert ("infra", "RewardWorkerDiedError") == (killed.owner, killed.kind)
    assert ("reward", "KeyError", "'ground_truth'") == (raised.owner, raised.kind, raised.message)
    assert "ray_judge_blueprint.py" in raised.traceback


@pytest.mark.slow
def test_a_reward_that_blocks_is_cut_off():
    """
    A reward that never returns fails at its deadline; its worker is replaced, and all other episodes are scored.
    """
    tasks = [*make_tasks(10), *make_tasks(1, "blocks")]
    with make_manager(JudgedBlueprint(blocking=True, reward_s=10.0), judges=0, reward_workers=1) as running:
        results = {r.task.uid: r for r in running.rollout(tasks)}

    assert {"blocks0"} == {uid for uid, r in results.items() if r.status is Status.FAILED}
    fault = results["blocks0"].fault
    assert ("reward", "TimeoutError") == (fault.owner, fault.kind)
    assert "reward BlockingReward took longer than 10 s" in fault.message


@pytest.mark.slow
def test_episodes_fail_when_no_judge_is_left(tmp_path):
    """
    When no replica of the judge can be restarted, episodes fail as infrastructure and keep their records.
    """
    blueprint = JudgedBlueprint(judge_folder=str(tmp_path))
    with make_manager(blueprint, reward_workers=0, judges=1, max_restarts=0) as manager:
        victim = pids(manager.runtime.pools["judge"].slots)[0]
        results = rollout_held(manager, make_tasks(12), lambda: os.kill(victim, signal.SIGKILL), tmp_path)

    assert [(r.status, r.fault.owner) for r in results] == [(Status.FAILED, "infra")] * 12
    assert all("replicas are dead" in r.fault.message for r in results)
    assert all(len(r.trajectories[0].turns()) == 4 for r in results)
