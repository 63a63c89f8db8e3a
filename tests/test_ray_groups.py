"""Group rewards on Ray: a group ends on one reward worker, and gets the scores of one process, whatever dies."""

import os
import signal

import pytest
from attrs import evolve
from ray_group_blueprint import GroupBlueprint, GroupSums
from ray_runs import FINISHED, ON_RAY, PLAN, make_tasks, pids, rollout_disturbed, wait_until

from turnwise import Status
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.runtime.groups import GroupScoring
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.remote.reward_pool import RewardPool

pytestmark = [*ON_RAY, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

GROUPS = evolve(PLAN, n=4)
LABEL = "group reward 'sums' of plugin 'test'"


class Seen(Observer):
    """Collects the ended episodes."""

    def __init__(self):
        self.rewards = {}

    def on_episode_finished(self, result):
        assert result.uid not in self.rewards
        self.rewards[result.uid] = result.reward


def make_manager(blueprint, observers, reward_workers=2):
    ray = RayConfig(backoff_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=120.0)
    config = RuntimeConfig(name="ray", num_workers=2, num_replicas=2, reward_workers=reward_workers, ray=ray)
    dispatcher, pool = Observers.of(observers), RewardPool(config.ray.reward_tries)
    runtime = RayRuntime(blueprint, config, dispatcher, group_pool=pool)
    groups = GroupScoring(GroupSums(deadline_s=blueprint.group_s), LABEL, GROUPS, dispatcher, 5.0, pool)
    return RolloutManager(runtime, GROUPS, dispatcher, groups=groups)


def scores_of(results):
    return {r.uid: (r.scores, r.metrics.extra) for r in results}


@pytest.fixture(scope="module")
def undisturbed():
    """The scores of ten groups in one process."""
    blueprint, observers = GroupBlueprint(), Observers()
    engine = blueprint.make_engine()
    groups = GroupScoring(GroupSums(), LABEL, GROUPS, observers, 5.0)
    runtime = LocalRuntime(engine, blueprint.make_components(engine))
    with RolloutManager(runtime, GROUPS, observers, groups=groups) as running:
        return scores_of(running.rollout(make_tasks(10)))


def test_groups_on_ray(undisturbed, tmp_path):
    """
    Scores are equal to one process's, also with a killed reward worker; a group's fault is its own; a service or a
    worker that fails once costs nothing; observers get each episode once with its last score.
    """
    seen = Seen()
    with make_manager(GroupBlueprint(folder=str(tmp_path)), [seen]) as running:
        results = running.rollout(make_tasks(10))
        assert undisturbed == scores_of(results)
        assert {r.uid: r.reward for r in results} == seen.rewards

        slot = running.runtime.rewards.slots[0]
        victim, starts = pids([slot])[0], slot.num_starts
        seen.rewards.clear()
        results = rollout_disturbed(running, make_tasks(10), lambda: os.kill(victim, signal.SIGKILL))
        assert undisturbed == scores_of(results)
        wait_until(lambda: slot.num_starts == starts + 1, "the reward worker was not restarted")

        seen.rewards.clear()
        tasks = [
            *make_tasks(2),
            *(make_tasks(1, f"group-{fault}")[0] for fault in ("kills-once", "fails-once", "raises")),
        ]
        results = running.rollout(tasks)
        failed = {r.task.uid: r.fault for r in results if r.status is Status.FAILED}
        assert {"group-raises0"} == set(failed)
        fault = failed["group-raises0"]
        assert ("reward", "KeyError", f"{LABEL}: 'answer'") == (fault.owner, fault.kind, fault.message)
        assert {4.0} == {r.metrics.extra["group_size"] for r in results if r.status in FINISHED}


@pytest.mark.slow
def test_a_group_that_blocks_is_cut_off():
    """It fails at its deadline; its reward worker is replaced, and the other groups are scored."""
    tasks = [*make_tasks(4), *make_tasks(1, "group-blocks")]
    with make_manager(GroupBlueprint(group_s=10.0), (), reward_workers=1) as running:
        results = running.rollout(tasks)

    failed = {r.task.uid: r.fault for r in results if r.status is Status.FAILED}
    assert {"group-blocks0"} == set(failed)
    fault = failed["group-blocks0"]
    assert ("reward", "TimeoutError") == (fault.owner, fault.kind)
    assert "took longer than 10 s" in fault.message
