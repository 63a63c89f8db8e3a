"""Replicas of two devices under Ray: vLLM starts its processes in one bundle or on two nodes, and updates weights."""

import sys
from pathlib import Path

import numpy as np
import pytest

from turnwise_testing.whole_runs.installation import write_distribution

ROOT = Path(__file__).parents[3]
BOUND = 1e-4
"""Nats by which a greedy token may be below the best one, because of ties."""

PLATFORM = """
from pathlib import Path
from turnwise_vllm_engine import copies
from vllm.platforms.cpu import CpuPlatform

class CpuOnRay(CpuPlatform):
    ray_device_key = "GPU"

def find():
    return "cpu_on_ray.CpuOnRay"

def node():
    import ray
    return ray.get_runtime_context().get_node_id()

class NotedCopies(copies.Copies):
    def write(self, path, offset, data):
        with Path(__file__).with_name("copied").open("a") as file:
            file.write(f"{node()}\\n")
        return super().write(path, offset, data)

copies.machine_id, copies.Copies = node, NotedCopies
"""
"""
A platform plugin of vLLM: it takes a CPU for the device that Ray calls GPU. vLLM's own platform has no name for it in
Ray, and refuses. The plugin also makes the two nodes of this machine look like two machines, and notes the node of each
copy.
"""

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """The address of a cluster of two nodes with one device each, whose processes have the platform plugin."""
    import os

    import ray
    from ray.cluster_utils import Cluster

    info = write_distribution(tmp_path, "cpu-on-ray", "1.0")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\ncpu_on_ray = cpu_on_ray:find\n")
    (tmp_path / "cpu_on_ray.py").write_text(PLATFORM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    node = {"num_cpus": 2, "num_gpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def make_run(*overrides):
    """Return the resolved example with greedy answers to four tasks, and its host."""
    from turnwise import load_resolved

    return load_resolved(
        str(ROOT / "examples" / "calculator_vllm.yaml"),
        [
            f"runtime.ray.replica_python={sys.executable}",
            "engine.engine_args={block_size: 32}",
            "runtime.num_replicas=null",
            "runtime.total_devices=2",
            "rollout.sampling.temperature=0",
            "rollout.response_length=128",
            "data.limit=4",
            *overrides,
        ],
    )


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


def named_workers():
    """Return the names of the actors that vLLM's executor `ray` has started; each reserves a device."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["name"].startswith("vllm_Worker")]


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_devices_in_one_bundle(size):
    """One Ray actor serves, sleeps, and then serves new weights from both processes."""
    from turnwise import RolloutManager
    from turnwise_calculator_demo import model_dir
    from turnwise_task_files import load_tasks
    from turnwise_testing.references.reference_model import TransformersReference

    run, host = make_run(f"engine.{size}=2")
    reference, tasks = TransformersReference(model_dir()), list(load_tasks(run))
    with RolloutManager.from_config(run, host) as manager:
        first = manager.rollout(tasks)
        awake = manager.memory_bytes()
        manager.sleep()
        asleep = manager.memory_bytes()
        manager.wake_up()
        report = manager.update_weights(reference.weights(variant=1))
        second = manager.rollout(tasks)

    assert [1] == [len(report.replicas)]
    greedy, count = all_greedy(reference, first, 0)
    assert greedy
    assert count > 50
    greedy, count = all_greedy(reference, second, 1)
    assert greedy
    assert count > 50
    assert asleep < awake


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_nodes_with_a_device_each(two_nodes, tmp_path, size):
    """vLLM's executor `ray` starts a worker in each bundle; both serve new weights, one of them from a copy."""
    from turnwise import RolloutManager
    from turnwise_calculator_demo import model_dir
    from turnwise_task_files import load_tasks
    from turnwise_testing.references.reference_model import TransformersReference

    run, host = make_run(
        f"engine.{size}=2",
        "runtime.device=gpu",
        "runtime.ray.devices_per_node=1",
        f"runtime.ray.address={two_nodes}",
    )
    reference, tasks = TransformersReference(model_dir()), list(load_tasks(run))
    with RolloutManager.from_config(run, host) as manager:
        first = manager.rollout(tasks)
        workers = named_workers()
        manager.update_weights(reference.weights(variant=1))
        second = manager.rollout(tasks)

    # The two nodes have a device each.
    assert 2 == len(workers)
    assert 1 == len(set((tmp_path / "copied").read_text().splitlines()))
    greedy, count = all_greedy(reference, first, 0)
    assert greedy
    assert count > 50
    greedy, count = all_greedy(reference, second, 1)
    assert greedy
    assert count > 50
