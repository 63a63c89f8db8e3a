"""Workers and replicas as real Ray actors, with real kills: every episode is delivered exactly once, unchanged."""

import os
import signal
from pathlib import Path

import pytest
from ray_blueprint import CuttingBlueprint, DyingBlueprint, ScriptedBlueprint
from ray_runs import (
    FINISHED,
    ON_RAY,
    PLAN,
    WATCHED,
    EpisodeOrder,
    check_complete,
    ids_by_task,
    kill_busy,
    make_manager,
    make_tasks,
    pids,
    rollout_disturbed,
    rollout_held,
    wait_for_replacement,
    wait_until,
)

from turnwise import Status
from turnwise.errors import EngineError
from turnwise.events.dispatch import Observers
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager

pytestmark = [*ON_RAY, pytest.mark.one_part, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def undisturbed():
    """The ids of 60 tasks in one process, by uid."""
    blueprint = ScriptedBlueprint()
    engine = blueprint.make_engine()
    with RolloutManager(LocalRuntime(engine, blueprint.make_components(engine)), PLAN) as manager:
        return ids_by_task(manager.rollout(make_tasks(60)))


@pytest.fixture(scope="module")
def order():
    """The order of starts and ends of the episodes of `running`."""
    return EpisodeOrder()


@pytest.fixture(scope="module")
def running(ray_cluster, order, tmp_path_factory):
    """A manager whose actors several tests kill: starting actors takes longer than the tests."""
    blueprint = ScriptedBlueprint(token_latency_s=0.005, folder=str(tmp_path_factory.mktemp("running")))
    with make_manager(blueprint, observers=Observers.of([order]), max_restarts=99) as manager:
        yield manager


@pytest.fixture(scope="module")
def watched(ray_cluster, tmp_path_factory):
    """A manager that replaces actors which do not answer for ten seconds."""
    blueprint = ScriptedBlueprint(token_latency_s=0.005, folder=str(tmp_path_factory.mktemp("watched")))
    with make_manager(blueprint, max_restarts=99, **WATCHED) as manager:
        yield manager


@pytest.mark.slow
def test_a_killed_replica_costs_nothing(undisturbed, running):
    """
    SIGKILL of a replica in mid-generation: its episodes continue elsewhere from their own tokens, with the same ids.
    """
    replicas, before = running.runtime.policy.slots, running.stats()
    (victim,) = pids(replicas[:1])
    results = rollout_held(running, make_tasks(60), lambda: os.kill(victim, signal.SIGKILL))

    check_complete(results, make_tasks(60))
    assert {result.status for result in results} <= FINISHED
    assert ids_by_task(results) == undisturbed
    wait_until(lambda: running.stats()["migrations"] > before["migrations"], "the replica had no request")
    assert running.stats()["retried"] == before["retried"]
    wait_for_replacement(replicas, victim)


def test_tasks_are_submitted_while_others_run(undisturbed, running):
    """Tasks that come one by one, between results, have the ids of one call; an abandoned feed ends its episodes."""
    tasks, results = make_tasks(60), []
    with running.open(limit=20) as feed:
        for task in tasks[:20]:
            feed.submit(task)
        for task in tasks[20:]:
            results.append(next(iter(feed)))
            feed.submit(task)
        feed.close()
        results += feed
    check_complete(results, tasks)
    assert ids_by_task(results) == undisturbed

    feed = running.open()
    for task in make_tasks(60, "held"):
        feed.submit(task)
    del feed
    wait_until(lambda: not running.runtime.dispatcher.keys, "a dropped feed still has episodes")
    assert running.unfinished == ()


def test_a_killed_worker_has_its_episodes_run_again(undisturbed, running):
    """
    SIGKILL of a worker: other workers run the episodes that it had not delivered, and each is delivered once.
    """
    workers = running.runtime.workers.slots
    victim, retried = pids(workers)[0], running.stats()["retried"]
    results = rollout_held(running, make_tasks(60), lambda: os.kill(victim, signal.SIGKILL))

    check_complete(results, make_tasks(60))
    # The less loaded worker gets the next episode, so on a busy machine one has more than half of them.
    assert retried < running.stats()["retried"] < retried + 60, "the worker had none of the episodes, or all"
    assert ids_by_task(results) == undisturbed
    wait_for_replacement(workers, victim)


@pytest.mark.slow
def test_a_replica_that_stops_answering_is_replaced(undisturbed, watched):
    """
    SIGSTOP in mid-generation: the process lives but does not answer, so it is killed and its episodes continue.
    """
    replicas, before = watched.runtime.policy.slots, watched.stats()
    (victim,) = pids(replicas[:1])
    results = rollout_held(watched, make_tasks(60), lambda: os.kill(victim, signal.SIGSTOP))

    check_complete(results, make_tasks(60))
    assert ids_by_task(results) == undisturbed
    wait_until(lambda: watched.stats()["migrations"] > before["migrations"], "the replica had no request")
    assert "did not reply for 10 s" in replicas[0].last_error
    wait_for_replacement(replicas, victim)


@pytest.mark.slow
def test_an_episode_that_kills_workers_fails_alone(running, order):
    """
    Two tasks that kill worker after worker fail as infrastructure. The others finish, in groups: if they ran one after
    the other after the second death, the chain of episodes would be as long as their number.
    """
    tasks = [*make_tasks(60), *make_tasks(2, "kills-worker")]
    order.longest_chain = 0
    before = running.stats()
    results = running.rollout(tasks)
    after = running.stats()

    check_complete(results, tasks)
    poisoned = {result.task.uid: result.fault.kind for result in results if result.fault is not None}
    assert poisoned == dict.fromkeys(("kills-worker0", "kills-worker1"), "PoisonedEpisode")
    assert not any(result.trainable for result in results if result.task.uid in poisoned)
    assert {result.status for result in results if result.task.uid not in poisoned} <= FINISHED
    assert 1 <= order.longest_chain <= 20
    # Two deaths of each task, and one for each division of at most 62 suspects by four.
    assert after["worker_restarts"] - before["worker_restarts"] <= 2 * (2 + 3)


@pytest.mark.slow
def test_an_episode_that_blocks_its_worker_fails_alone(watched):
    """
    An episode that blocks its worker's event loop has the worker replaced, and all other episodes finish.
    """
    tasks = [*make_tasks(6), *make_tasks(1, "loop-blocks")]
    results = watched.rollout(tasks)

    check_complete(results, tasks)
    (blocked,) = [result for result in results if result.fault is not None]
    assert (blocked.task.uid, blocked.fault.kind) == ("loop-blocks0", "PoisonedEpisode")
    assert "did not reply for 10 s" in blocked.fault.message


@pytest.mark.slow
def test_an_interrupt_ends_a_run_whose_worker_is_blocked(watched):
    """
    An abort ends the blocked worker's episodes too, and none of them runs again.
    """
    blocked = Path(watched.runtime.blueprint.folder, "blocked")
    blocked.unlink(missing_ok=True)
    tasks = [*make_tasks(3), *make_tasks(1, "loop-blocks")]
    quarantined = watched.stats()["quarantined"]
    finished = watched.iterate(tasks)
    wait_until(blocked.exists, "no worker was blocked")
    watched.abort()
    results = {result.task.uid: result for result in finished}

    assert len(results) == 4
    assert results["loop-blocks0"].status is Status.ABORTED
    assert watched.stats()["quarantined"] == quarantined


@pytest.mark.slow
def test_tools_that_raise_or_block_delay_no_other_episode(running):
    """
    A tool that blocks its thread is abandoned at its deadline, and the error of one that raises goes to the model.
    """
    tasks = [*make_tasks(10), *make_tasks(1, "tool-blocks"), *make_tasks(1, "tool-raises")]
    results = {result.task.uid: result for result in running.rollout(tasks)}

    assert {result.status for result in results.values()} <= FINISHED
    assert results["tool-blocks0"].metrics.num_tool_errors == 3
    assert results["tool-raises0"].metrics.num_tool_errors == 3


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
    with make_manager(DyingBlueprint(died=str(tmp_path / "died")), workers=1) as manager:
        replicas = manager.runtime.policy.slots
        before = set(pids(replicas))
        results = manager.rollout(make_tasks(60))
        wait_until(lambda: manager.stats()["migrations"] > 0, "no request moved")
        wait_until(lambda: len(set(pids(replicas)) & before) == 1 < len(pids(replicas)), "no replica was replaced")

    assert (tmp_path / "died").exists()
    check_complete(results, make_tasks(60))
    assert ids_by_task(results) == undisturbed


@pytest.mark.slow
def test_episodes_fail_when_no_replica_is_left(tmp_path):
    """
    When no replica can be restarted, the episodes fail with the reason and keep their sampled tokens.
    """
    blueprint = ScriptedBlueprint(folder=str(tmp_path), hold_after=len("task19"))  # all wait in their second turn
    with make_manager(blueprint, workers=1, replicas=1, max_restarts=0) as manager:
        (slot,) = manager.runtime.policy.slots
        results = rollout_held(manager, make_tasks(20), lambda: kill_busy(slot))

    check_complete(results, make_tasks(20))
    assert {(result.fault.owner, result.fault.kind) for result in results} == {("engine", "ReplicaDiedError")}
    assert all("replicas are dead" in result.fault.message for result in results)
    assert all(len(result.trajectories[0].turns()) == 1 for result in results)


@pytest.mark.slow
def test_episodes_fail_when_no_worker_is_left(tmp_path):
    """
    With no worker left every episode is delivered as failed, and nothing hangs.
    """
    with make_manager(ScriptedBlueprint(folder=str(tmp_path)), workers=1, replicas=1, max_restarts=0) as manager:
        (victim,) = pids(manager.runtime.workers.slots)
        results = rollout_held(manager, make_tasks(20), lambda: os.kill(victim, signal.SIGKILL))

    check_complete(results, make_tasks(20))
    assert {(result.status, result.fault.owner) for result in results} == {(Status.FAILED, "infra")}


@pytest.mark.slow
def test_abort_delivers_everything():
    """
    An abort ends every running episode early and delivers it with its tokens.
    """
    # The first episode to end is far ahead of most others: a turn takes seconds.
    with make_manager(ScriptedBlueprint(token_latency_s=0.2), workers=1, replicas=1) as manager:
        results = rollout_disturbed(manager, make_tasks(60), manager.abort)

    check_complete(results, make_tasks(60))
    aborted = [result for result in results if result.status is Status.ABORTED]
    assert {result.status for result in results} <= {Status.ABORTED, *FINISHED}
    assert aborted
    assert any(result.trajectories and result.trajectories[0].num_response_tokens for result in aborted)


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_reported():
    """
    After the last retry the caller receives the engine's own reason.
    """
    manager = make_manager(BrokenBlueprint(), replicas=1, max_starts=2)
    with pytest.raises(EngineError, match=r"replica 0 could not be started: .*no weights there \(2 tries\)"):
        manager.start()


class BrokenBlueprint(ScriptedBlueprint):
    """A blueprint whose engine cannot be built."""

    def make_engine(self):
        raise EngineError("no weights there")


@pytest.mark.slow
def test_cut_channels_change_nothing(undisturbed):
    """The network between workers and replicas fails, and no process does: none is restarted, all results are equal."""
    with make_manager(CuttingBlueprint(), workers=2, replicas=2) as manager:
        results = manager.rollout(make_tasks(60))
        stats = manager.stats()

    check_complete(results, make_tasks(60))
    assert ids_by_task(results) == undisturbed
    assert stats["migrations"] > 0, "no channel was cut while it was used"
    assert [0, 0, 0] == [stats[name] for name in ("retried", "worker_restarts", "replica_restarts")]
