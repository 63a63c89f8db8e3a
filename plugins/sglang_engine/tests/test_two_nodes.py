"""A replica of two devices on two nodes: the real SGLang runs a server on each, and all ranks get new weights."""

import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120
BOUND = 1e-4
"""Nats by which a greedy token may be below the best one, because of ties."""

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def two_nodes():
    """The address of a cluster of two nodes; Ray counts a GPU on each, and the engine runs on the CPU."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "num_gpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def all_greedy(reference, results, variant):
    """Return whether every sampled token is the best one under a variant's weights, and how many tokens there are."""
    below = []
    for result in results:
        (trajectory,) = result.trajectories
        sampled = np.asarray(trajectory.response_mask) == 1
        ids = trajectory.input_ids.tolist()
        scores, best = reference.scores(ids, len(ids) - len(sampled), temperature=1.0, variant=variant)
        below.extend((best - scores)[sampled])
    return bool((np.array(below) <= BOUND).all()), len(below)


def own_processes(name):
    """Return SGLang's processes with a name that this test has started, through Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_two_nodes_with_a_device_each(two_nodes):
    """Each node has a server with one rank; both serve, and serve new weights, and a lost rank restarts the replica."""
    from turnwise import RolloutManager, load_resolved
    from turnwise_calculator_demo import model_dir
    from turnwise_task_files import load_tasks
    from turnwise_testing.references.reference_model import TransformersReference

    run, host = load_resolved(
        str(ROOT / "examples" / "calculator_sglang.yaml"),
        [
            f"runtime.ray.replica_python={sys.executable}",
            "engine.device=cpu",
            "engine.tensor_parallel_size=2",
            "runtime.device=gpu",
            "runtime.num_replicas=null",
            "runtime.total_devices=2",
            "runtime.ray.devices_per_node=1",
            f"runtime.ray.address={two_nodes}",
            "rollout.sampling.temperature=0",
            "rollout.response_length=128",
            "data.limit=4",
        ],
    )
    reference, tasks = TransformersReference(model_dir()), list(load_tasks(run))
    with RolloutManager.from_config(run, host) as manager:
        first = manager.rollout(tasks)
        manager.update_weights(reference.weights(variant=1))
        second = manager.rollout(tasks)
        servers, (follower,) = own_processes("turnwise_sglang_engine.server"), own_processes("sglang::scheduler_TP1")
        follower.kill()
        _, alive = psutil.wait_procs(servers, timeout=TIMEOUT_S)
        third = manager.rollout(tasks)
        restarts = manager.stats()["replica_restarts"]

    assert (2, [], 1) == (len(servers), alive, restarts)
    greedy, count = all_greedy(reference, first, 0)
    assert greedy
    assert count > 50
    for results in (second, third):
        greedy, count = all_greedy(reference, results, 1)
        assert greedy
        assert count > 50
