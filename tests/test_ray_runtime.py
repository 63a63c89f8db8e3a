"""Workers and replicas as real Ray actors, with real kills: nothing is lost, nothing comes twice."""

import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ray_blueprint import DyingBlueprint, ScriptedBlueprint

from turnwise import Status, Task
from turnwise.config_runtime import RayConfig, RuntimeConfig
from turnwise.errors import EngineError
from turnwise.invariants import check_trajectory
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime

ENDED = {Status.COMPLETED, Status.TRUNCATED}
"""By itself: the last turn may have reached its token limit."""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray cluster on loopback for all tests of this file."""
    import ray

    here = str(Path(__file__).parent)
    ray.init(include_dashboard=False, num_cpus=8, namespace="turnwise", runtime_env={"env_vars": {"PYTHONPATH": here}})
    yield
    ray.shutdown()


def manager(blueprint=None, *, workers=2, replicas=2, **ray_options):
    ray_options = {"backoff_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 1.0} | ray_options
    config = RuntimeConfig(name="ray", num_workers=workers, num_replicas=replicas, ray=RayConfig(**ray_options))
    runtime = RayRuntime(blueprint or ScriptedBlueprint(), config)
    plan = RolloutPlan(default_agent="four", agent_names=frozenset({"four"}))
    return RolloutManager(runtime, plan)


def tasks(count, prefix="task"):
    message = {"role": "user", "content": "x"}
    return [Task(messages=(message,), uid=f"{prefix}{i}", sample_index=i) for i in range(count)]


def pids(running, kind):
    import ray

    seats = running.runtime.policy.seats if kind == "replica" else running.runtime.workers.seats
    return [int(ray.get(seat.handle.stats.remote())["pid"]) for seat in seats if seat.handle is not None]


def wait_for_pids(running, kind, count, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while len(found := pids(running, kind)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} came back"
        time.sleep(0.1)
    return found


def later(delay_s, call):
    timer = threading.Timer(delay_s, call)
    timer.start()
    return timer


def assert_whole(results, expected):
    """Every task is there exactly once, finished records hold, and nothing of them is lost or doubled."""
    assert Counter(r.task.uid for r in results) == Counter(t.uid for t in expected)
    for result in results:
        for trajectory in result.trajectories:
            check_trajectory(trajectory)
        if result.status in ENDED:
            assert len(result.trajectories[0].turns()) == 4


@pytest.fixture(scope="module")
def undisturbed():
    """What 60 tasks give when nothing goes wrong: ids by uid."""
    with manager(workers=1, replicas=1) as running:
        results = running.rollout(tasks(60))
    return {r.task.uid: r.trajectories[0].input_ids.tolist() for r in results}


def test_any_number_of_workers_and_replicas_gives_the_same(undisturbed):
    """
    Three workers and three replicas give, bit for bit, what one of each gives, in the order of the tasks.
    """
    with manager(workers=3, replicas=3) as running:
        results = running.rollout(tasks(60))

    assert [r.task.uid for r in results] == [t.uid for t in tasks(60)]
    assert {r.task.uid: r.trajectories[0].input_ids.tolist() for r in results} == undisturbed


def test_a_killed_replica_costs_nothing(undisturbed):
    """
    SIGKILL in mid-generation: the episodes go on elsewhere from their own tokens and end as if nothing had been.
    """
    with manager() as running:
        victim = pids(running, "replica")[0]
        later(0.15, lambda: os.kill(victim, signal.SIGKILL))
        results = running.rollout(tasks(60))
        again = wait_for_pids(running, "replica", 2)

    assert_whole(results, tasks(60))
    assert {r.status for r in results} <= ENDED
    assert {r.task.uid: r.trajectories[0].input_ids.tolist() for r in results} == undisturbed
    assert victim not in again


def test_an_engine_that_dies_in_its_actor_is_replaced(undisturbed, tmp_path):
    """
    The actor lives, its engine does not: it serves nobody any more, its episodes go on elsewhere, another is started.
    """
    with manager(DyingBlueprint(died=str(tmp_path / "died"))) as running:
        before = pids(running, "replica")
        results = running.rollout(tasks(60))
        after = wait_for_pids(running, "replica", 2)

    assert (tmp_path / "died").exists()
    assert_whole(results, tasks(60))
    assert {r.task.uid: r.trajectories[0].input_ids.tolist() for r in results} == undisturbed
    assert len(set(before) - set(after)) == 1


def test_a_killed_worker_has_its_episodes_run_again(undisturbed):
    """
    SIGKILL of a worker: what it had not delivered is run by others, and comes once.
    """
    with manager() as running:
        victim = pids(running, "worker")[0]
        later(0.15, lambda: os.kill(victim, signal.SIGKILL))
        results = running.rollout(tasks(60))
        retried = running.runtime.books.num_retried

    assert_whole(results, tasks(60))
    assert retried > 0
    assert {r.task.uid: r.trajectories[0].input_ids.tolist() for r in results} == undisturbed


def test_a_replica_that_stops_answering_is_replaced(undisturbed):
    """
    SIGSTOP: the process lives but does not answer; after the heartbeat's timeout it is killed and replaced.
    """
    with manager() as running:
        victim = pids(running, "replica")[0]
        later(0.15, lambda: os.kill(victim, signal.SIGSTOP))
        results = running.rollout(tasks(60))

    assert_whole(results, tasks(60))
    assert {r.task.uid: r.trajectories[0].input_ids.tolist() for r in results} == undisturbed


def test_an_episode_that_kills_workers_is_set_aside():
    """
    A task that takes worker after worker with it fails as infrastructure; all others finish, also those beside it.
    """
    rows = [*tasks(12), *tasks(2, "kills-worker")]
    with manager(max_restarts=4) as running:
        results = running.rollout(rows)

    assert_whole(results, rows)
    poisoned = [r for r in results if r.fault is not None]
    assert {r.fault.kind for r in poisoned} == {"PoisonedEpisode"}
    assert {r.task.uid for r in poisoned} == {"kills-worker0", "kills-worker1"}
    assert not any(r.trainable for r in poisoned)


def test_an_episode_that_blocks_its_worker_is_set_aside():
    """
    Its event loop stands still: the worker does not answer, is replaced, and all other episodes finish.
    """
    rows = [*tasks(12), *tasks(1, "loop-blocks")]
    with manager(heartbeat_timeout_s=2.0) as running:
        results = running.rollout(rows)

    assert_whole(results, rows)
    (blocked,) = [r for r in results if r.fault is not None]
    assert (blocked.task.uid, blocked.fault.kind) == ("loop-blocks0", "PoisonedEpisode")
    assert "did not answer for 2 s" in blocked.fault.message


def test_an_interrupt_ends_a_run_whose_worker_is_blocked():
    """
    What the blocked worker had is cut with the rest, and not run again.
    """
    rows = [*tasks(3), *tasks(1, "loop-blocks")]
    with manager(workers=1, heartbeat_timeout_s=2.0) as running:
        later(3.0, running.abort)
        results = {r.task.uid: r for r in running.rollout(rows)}

    assert len(results) == 4
    assert results["loop-blocks0"].status is Status.ABORTED


def test_tools_that_raise_or_block_hold_nobody_up():
    """
    A tool that blocks its thread is left after its deadline; one that raises is told to the model.
    """
    rows = [*tasks(10), *tasks(1, "tool-blocks"), *tasks(1, "tool-raises")]
    with manager() as running:
        results = {r.task.uid: r for r in running.rollout(rows)}

    assert {r.status for r in results.values()} <= ENDED
    assert results["tool-blocks0"].metrics.num_tool_errors == 3
    assert results["tool-raises0"].metrics.num_tool_errors == 3
    assert results["tool-blocks0"].metrics.total_s < 8


def test_all_replicas_dead_keeps_the_records():
    """
    When no replica will come back the episodes fail with the reason, and keep what they had sampled.
    """
    with manager(ScriptedBlueprint(token_latency_s=0.01), replicas=1, max_restarts=0) as running:
        victim = pids(running, "replica")[0]
        later(0.4, lambda: os.kill(victim, signal.SIGKILL))
        results = running.rollout(tasks(20))

    assert_whole(results, tasks(20))
    failed = [r for r in results if r.status is Status.FAILED]
    assert failed
    assert all("replicas are dead" in r.fault.message for r in failed)
    assert any(r.trajectories[0].num_response_tokens for r in failed)


def test_every_worker_dead_is_told():
    """
    With no worker left every episode is delivered as failed; nothing hangs.
    """
    with manager(workers=1, max_restarts=0) as running:
        victim = pids(running, "worker")[0]
        later(0.1, lambda: os.kill(victim, signal.SIGKILL))
        results = running.rollout(tasks(20))

    assert_whole(results, tasks(20))
    assert {r.fault.owner for r in results if r.status is Status.FAILED} == {"infra"}


def test_abort_delivers_everything():
    """
    An abort ends all episodes soon, with what they have.
    """
    with manager(ScriptedBlueprint(token_latency_s=0.4)) as running:
        later(0.8, running.abort)
        started = time.perf_counter()
        results = running.rollout(tasks(30))

    assert time.perf_counter() - started < 20
    assert_whole(results, tasks(30))
    assert {r.status for r in results} == {Status.ABORTED}
    assert any(r.trajectories and r.trajectories[0].num_response_tokens for r in results)


def test_an_engine_that_cannot_start_is_told():
    """
    The caller gets the engine's own reason after the retries.
    """

    with pytest.raises(EngineError, match=r"replica 0 could not be started: .*no weights there"):
        manager(BrokenBlueprint(), max_restarts=1).start()


class BrokenBlueprint(ScriptedBlueprint):
    """Its engine cannot be built."""

    def make_engine(self):
        """Fail."""
        raise EngineError("no weights there")
