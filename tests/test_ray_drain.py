"""A node that Ray will remove: its actors finish their work, or hand it over, and continue on another node."""

import time
from pathlib import Path

import pytest
from ray_judge_blueprint import JudgedBlueprint
from ray_runs import FINISHED, ON_RAY, PLAN, check_complete, make_tasks, rollout_held, wait_until

from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.ray.runtime import RayRuntime

pytestmark = [*ON_RAY, pytest.mark.slow]


@pytest.fixture
def cluster():
    """A head without actors of a run, and two nodes with two GPUs each."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(num_cpus=4, num_gpus=2, labels={"pool": "run"})
        made.wait_for_nodes()
        ray.init(address=made.address, namespace="turnwise")
        yield made
        ray.shutdown()
        made.shutdown()


def make_manager(folder):
    """Return a manager of two replicas, four workers and two reward workers on the labelled nodes."""
    labels = {"labels": {"pool": "run"}}
    options = RayConfig(
        backoff_s=0.05,
        heartbeat_s=0.2,
        heartbeat_timeout_s=120.0,
        replica_resources={"num_gpus": 1, **labels},
        worker_resources={"num_cpus": 0.1, **labels},
    )
    config = RuntimeConfig(name="ray", num_workers=4, num_replicas=2, reward_workers=2, ray=options)
    return RolloutManager(RayRuntime(JudgedBlueprint(folder=str(folder), judged=False), config), PLAN)


def drain(node_id, seconds):
    """Announce, as a cloud's autoscaler does, that a node will be preempted."""
    import ray
    from ray.core.generated import autoscaler_pb2

    deadline_ms = int((time.time() + seconds) * 1000)
    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
    client = ray._private.worker.global_worker.gcs_client
    accepted, text = client.drain_node(node_id, reason, "the price is too high", deadline_ms)
    assert accepted, text


def actors_by_node(manager):
    """Return the names of the live actors of a run, by their node."""
    import ray

    prefix, found = f"turnwise-{manager.runtime.cluster.run_name}-", {}
    for actor in ray._private.state.actors().values():
        if actor["Name"].startswith(prefix) and actor["State"] == "ALIVE":
            found.setdefault(actor["Address"]["NodeID"], []).append(actor["Name"].removeprefix(prefix))
    return found


def kinds(names):
    return {name.rsplit("-", 2)[0] for name in names}


def has_moved(manager, node_id):
    """Return whether no actor of a run is on a node, and every slot has one elsewhere."""
    found = actors_by_node(manager)
    return node_id not in found and 8 == sum(map(len, found.values()))


@pytest.mark.parametrize("in_time", [True, False], ids=["work ends in time", "work is handed over"])
def test_actors_leave_a_node_that_is_drained(cluster, tmp_path, in_time):
    """
    Every episode is delivered, and no death is counted. If the work of the node ends in time, none is repeated.
    """
    with make_manager(tmp_path) as manager:
        node_id = manager.call(manager.runtime.locate_replicas())[0][0]
        assert {"worker", "replica", "reward-worker"} >= kinds(actors_by_node(manager)[node_id]) >= {"worker"}
        leaving = manager.runtime.policy.slots[0].leaving

        def disturb():
            drain(node_id, 600 if in_time else 10)
            if in_time:
                wait_until(leaving.is_set, "the replica does not leave")
                assert not has_moved(manager, node_id)
            else:
                wait_until(lambda: has_moved(manager, node_id), "the actors have not moved")

        tasks = make_tasks(16)
        results = rollout_held(manager, tasks, disturb, tmp_path)
        check_complete(results, tasks)
        assert {result.status for result in results} <= FINISHED
        wait_until(lambda: has_moved(manager, node_id), "the actors have not moved")
        stats = manager.stats()
        assert 0 == stats["quarantined"]
        assert in_time == (stats["retried"] == 0)
        assert in_time == (stats["resent"] == 0)
        assert 0 == sum(slot.restarts for slot in manager.runtime._slots)
        check_complete(manager.rollout(tasks), tasks)
