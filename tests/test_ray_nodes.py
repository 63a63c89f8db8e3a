"""Workers and replicas on a cluster of unequal nodes: they are spread, and labels choose the nodes."""

import json
from pathlib import Path

import pytest
from ray_blueprint import ScriptedBlueprint
from ray_judge_blueprint import TellingBlueprint
from ray_runs import FINISHED, ON_RAY, PLAN, locate_workers, make_tasks

from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.ray.runtime import RayRuntime

pytestmark = [*ON_RAY, pytest.mark.one_part, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes for workers, and one with two GPUs for replicas; the head has no label."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        made.cpu_nodes = [made.add_node(num_cpus=4, labels={"pool": "cpu"}) for _ in range(2)]
        made.gpu_node = made.add_node(num_cpus=4, num_gpus=2, labels={"pool": "gpu"})
        made.wait_for_nodes()
        ray.init(address=made.address, namespace="turnwise")
        yield made
        ray.shutdown()
        made.shutdown()


def make_manager(blueprint, *, workers, replicas=2, **ray):
    options = RayConfig(backoff_s=0.05, heartbeat_s=0.2, heartbeat_timeout_s=120.0, **ray)
    config = RuntimeConfig(name="ray", num_workers=workers, num_replicas=replicas, ray=options)
    return RolloutManager(RayRuntime(blueprint, config), PLAN)


@pytest.mark.parametrize("gpu", [True, False], ids=["replicas with devices", "replicas without"])
def test_labels_choose_the_nodes(cluster, tmp_path, gpu):
    """Workers run on both of the labelled nodes and no other, and the replicas on the one with GPUs."""
    own = {"labels": {"pool": "gpu"}} | ({"num_gpus": 1} if gpu else {})
    asked = {"num_cpus": 1, "labels": {"pool": "cpu"}}
    blueprint = TellingBlueprint(folder=str(tmp_path))
    with make_manager(blueprint, workers=4, replica_resources=own, worker_resources=asked) as manager:
        results = manager.rollout(make_tasks(8))
        workers = locate_workers(manager)

    assert sorted(node.node_id for node in cluster.cpu_nodes for _ in range(2)) == sorted(workers)
    notes = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert [cluster.gpu_node.node_id] * 2 == [note["node"] for note in notes]
    assert 8 == len([result for result in results if result.status in FINISHED])


def test_workers_are_spread_by_default(cluster):
    """No option is needed for workers on several nodes."""
    with make_manager(ScriptedBlueprint(), workers=6) as manager:
        nodes = locate_workers(manager)

    assert 6 == len(nodes)
    assert len(set(nodes)) > 1


def test_placement_groups_follow_the_number_of_replicas(cluster, tmp_path):
    """A new replica reserves a device, and a removed one returns it; the run ends without any."""
    import ray

    def num_groups():
        return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())

    blueprint = TellingBlueprint(folder=str(tmp_path))
    with make_manager(blueprint, workers=1, replicas=1, replica_resources={"num_gpus": 1}) as manager:
        numbers = [num_groups()]
        for number in (2, 1, 2):
            manager.resize(number)
            numbers.append(num_groups())
        results = manager.rollout(make_tasks(4))

    assert [1, 2, 1, 2] == numbers
    assert all(result.status in FINISHED for result in results)
    assert 0 == num_groups()
