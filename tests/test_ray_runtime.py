"""Workers and replicas as real Ray actors, with real kills: every episode is delivered exactly once, unchanged."""

import os
import signal
import threading

import pytest
from ray_blueprint import DyingBlueprint, ScriptedBlueprint
from ray_runs import (
    FINISHED,
    PLAN,
    check_complete,
    ids_by_task,
    make_tasks,
    pids,
    rollout_disturbed,
    wait_for_replacement,
    wait_until,
)

from turnwise import Status
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.errors import EngineError
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.ray.runtime import RayRuntime

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore"),
]


def make_manager(blueprint=None, *, workers=2, replicas=2, **ray_options):
    ray_options = {"backoff_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 2.0} | ray_options
    config = RuntimeConfig(name="ray", num_workers=workers, num_replicas=replicas, ray=RayConfig(**ray_options))
    return RolloutManager(RayRuntime(blueprint or ScriptedBlueprint(), config), PLAN)


@pytest.fixture(scope="module")
def undisturbed():
    """The ids of 60 tasks in one process, by uid."""
    blueprint = ScriptedBlueprint()
    engine = blueprint.make_engine()
    with RolloutManager(LocalRuntime(engine, blueprint.make_components(engine)), PLAN) as manager:
        return ids_by_task(manager.rollout(make_tasks(60)))


@pytest.fixture(scope="module")
def running(ray_cluster):
    """A manager whose actors several tests kill: starting actors takes longer than the tests."""
    with make_manager(max_restarts=9) as manager:
        yield manager


def test_a_killed_replica_costs_nothing(undisturbed, running):
    """
    SIGKILL of a replica in mid-generation: its episodes continue elsewhere from their own tokens, with the same ids.
    """
    replicas = running.runtime.policy.slots
    victim = pids(replicas)[0]
    results = rollout_disturbed(running, make_tasks(60), lambda: os.kill(victim, signal.SIGKILL))

    check_complete(results, make_tasks(60))
    assert {result.status for result in results} <= FINISHED
    assert ids_by_task(results) == undisturbed
    wait_for_replacement(replicas, victim)


def test_a_killed_worker_has_its_episodes_run_again(undisturbed, running):
    """
    SIGKILL of a worker: other workers run the episodes that it had not delivered, and each is delivered once.
    """
    workers = running.runtime.workers.slots
    victim, retried = pids(workers)[0], running.stats()["retried"]
    results = rollout_disturbed(running, make_tasks(60), lambda: os.kill(victim, signal.SIGKILL))

    check_complete(results, make_tasks(60))
    assert running.stats()["retried"] > retried
    assert ids_by_task(results) == undisturbed
    wait_for_replacement(workers, victim)


@pytest.mark.slow
def test_a_replica_that_stops_answering_is_replaced(undisturbed, running):
    """
    SIGSTOP: the process lives but does not answer, and is killed and replaced after the heartbeat's timeout.
    """
    replicas = running.runtime.policy.slots
    victim = pids(replicas)[0]
    results = rollout_disturbed(running, make_tasks(60), lambda: os.kill(victim, signal.SIGSTOP))

    check_complete(results, make_tasks(60))
    assert ids_by_task(results) == undisturbed


@pytest.mark.slow
def test_any_number_of_workers_and_replicas_gives_the_same(undisturbed):
    """
    Three workers and three replicas give, bit for bit, the ids of one process, in the order of the tasks.
    """
    with make_manager(workers=3, replicas=3) as manager:
        results = manager.rollout(make_tasks(60))

    assert [result.task.uid for result in results] == [task.uid for task in make_tasks(60)]
    assert ids_by_task(results) == undisturbed


@pytest.mark.slow
def test_an_engine_that_dies_in_its_actor_is_replaced(undisturbed, tmp_path):
    """
    The actor lives but its engine is dead: requests avoid it, its episodes continue elsewhere, and it is replaced.
    """
    with make_manager(DyingBlueprint(died=str(tmp_path / "died"))) as manager:
        replicas = manager.runtime.policy.slots
        before = set(pids(replicas))
        results = manager.rollout(make_tasks(60))
        wait_until(lambda: len(set(pids(replicas)) & before) == 1 < len(pids(replicas)), "no replica was replaced")

    assert (tmp_path / "died").exists()
    check_complete(results, make_tasks(60))
    assert ids_by_task(results) == undisturbed


@pytest.mark.slow
def test_an_episode_that_kills_workers_is_quarantined():
    """
    A task that kills worker after worker fails as infrastructure; all others finish, also those that ran beside it.
    """
    tasks = [*make_tasks(12), *make_tasks(2, "kills-worker")]
    with make_manager(max_restarts=4) as manager:
        results = manager.rollout(tasks)

    check_complete(results, tasks)
    poisoned = [result for result in results if result.fault is not None]
    assert {result.fault.kind for result in poisoned} == {"PoisonedEpisode"}
    assert {result.task.uid for result in poisoned} == {"kills-worker0", "kills-worker1"}
    assert not any(result.trainable for result in poisoned)


@pytest.mark.slow
def test_an_episode_that_blocks_its_worker_is_quarantined():
    """
    An episode that blocks its worker's event loop has the worker replaced, and all other episodes finish.
    """
    tasks = [*make_tasks(12), *make_tasks(1, "loop-blocks")]
    with make_manager() as manager:
        results = manager.rollout(tasks)

    check_complete(results, tasks)
    (blocked,) = [result for result in results if result.fault is not None]
    assert (blocked.task.uid, blocked.fault.kind) == ("loop-blocks0", "PoisonedEpisode")
    assert "did not reply for 2 s" in blocked.fault.message


@pytest.mark.slow
def test_an_interrupt_ends_a_run_whose_worker_is_blocked():
    """
    An abort ends the blocked worker's episodes too, and none of them runs again.
    """
    tasks = [*make_tasks(3), *make_tasks(1, "loop-blocks")]
    with make_manager(workers=1) as manager:
        threading.Timer(3.0, manager.abort).start()  # a blocked worker sends no event to wait for
        results = {result.task.uid: result for result in manager.rollout(tasks)}

    assert len(results) == 4
    assert results["loop-blocks0"].status is Status.ABORTED


@pytest.mark.slow
def test_tools_that_raise_or_block_delay_no_other_episode():
    """
    A tool that blocks its thread is abandoned at its deadline, and the error of one that raises goes to the model.
    """
    tasks = [*make_tasks(10), *make_tasks(1, "tool-blocks"), *make_tasks(1, "tool-raises")]
    with make_manager() as manager:
        results = {result.task.uid: result for result in manager.rollout(tasks)}

    assert {result.status for result in results.values()} <= FINISHED
    assert results["tool-blocks0"].metrics.num_tool_errors == 3
    assert results["tool-raises0"].metrics.num_tool_errors == 3


@pytest.mark.slow
def test_all_replicas_dead_keeps_the_records():
    """
    When no replica can be restarted, the episodes fail with the reason and keep their sampled tokens.
    """
    with make_manager(ScriptedBlueprint(token_latency_s=0.01), replicas=1, max_restarts=0) as manager:
        victim = pids(manager.runtime.policy.slots)[0]
        results = rollout_disturbed(manager, make_tasks(20), lambda: os.kill(victim, signal.SIGKILL))

    check_complete(results, make_tasks(20))
    failed = [result for result in results if result.status is Status.FAILED]
    assert failed
    assert all("replicas are dead" in result.fault.message for result in failed)
    assert any(result.trajectories[0].num_response_tokens for result in failed)


@pytest.mark.slow
def test_episodes_fail_when_no_worker_is_left():
    """
    With no worker left every episode is delivered as failed, and nothing hangs.
    """
    with make_manager(ScriptedBlueprint(token_latency_s=0.01), workers=1, max_restarts=0) as manager:
        victim = pids(manager.runtime.workers.slots)[0]
        results = rollout_disturbed(manager, make_tasks(20), lambda: os.kill(victim, signal.SIGKILL))

    check_complete(results, make_tasks(20))
    assert {result.fault.owner for result in results if result.status is Status.FAILED} == {"infra"}


@pytest.mark.slow
def test_abort_delivers_everything():
    """
    An abort ends every running episode early and delivers it with its tokens.
    """
    with make_manager(ScriptedBlueprint(token_latency_s=0.2)) as manager:
        results = rollout_disturbed(manager, make_tasks(60), manager.abort)

    check_complete(results, make_tasks(60))
    aborted = [result for result in results if result.status is Status.ABORTED]
    assert {result.status for result in results} <= {Status.ABORTED, *FINISHED}
    assert len(aborted) > len(results) // 2
    assert any(result.trajectories and result.trajectories[0].num_response_tokens for result in aborted)


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_reported():
    """
    After the last retry the caller receives the engine's own reason.
    """
    with pytest.raises(EngineError, match=r"replica 0 could not be started: .*no weights there"):
        make_manager(BrokenBlueprint(), max_restarts=1).start()


class BrokenBlueprint(ScriptedBlueprint):
    """A blueprint whose engine cannot be built."""

    def make_engine(self):
        raise EngineError("no weights there")
