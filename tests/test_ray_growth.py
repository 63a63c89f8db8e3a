"""A run on Ray whose cluster grows: by hand, and by Ray's autoscaler."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray_blueprint import ScriptedBlueprint
from ray_runs import FINISHED, ON_RAY, PLAN, check_complete, make_tasks, pids, wait_until
from test_ray_resize import serving
from test_ray_weights import BigramBlueprint, versions_of, weights_of

from turnwise import SamplingParams
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.errors import ConfigError
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise_weight_transports.config import BucketConfig
from turnwise_weight_transports.ray_store import RayTransport

pytestmark = [*ON_RAY, pytest.mark.slow]


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    """Actors find the tests' modules; nodes that join later inherit it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def cluster():
    """A head for workers, and one node with a GPU."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    made.add_node(num_cpus=1, num_gpus=1)
    made.wait_for_nodes()
    ray.init(address=made.address, namespace="turnwise")
    yield made
    ray.shutdown()
    made.shutdown()


def make_config(**ray):
    options = RayConfig(heartbeat_s=0.2, heartbeat_timeout_s=120.0, replica_resources={"num_gpus": 1}, **ray)
    return RuntimeConfig(name="ray", num_replicas=1, ray=options)


def make_manager(**ray):
    return RolloutManager(RayRuntime(ScriptedBlueprint(), make_config(**ray)), PLAN)


def num_live(manager):
    return len(pids(manager.runtime.policy.slots))


def groups_by_state():
    import ray

    states = [group["state"] for group in ray.util.placement_group_table().values()]
    return {state: states.count(state) for state in states if state != "REMOVED"}


def test_a_replica_joins_with_a_node(cluster):
    """The episodes of the first replica continue, the new one gets the current weights, and the number has a limit."""
    weights = GroupWeights(WeightUpdater(RayTransport(BucketConfig()), "ray"))
    runtime = RayRuntime(BigramBlueprint(), make_config(max_replicas=2), weights=weights)
    plan = RolloutPlan(default_agent="four", agents={"four": None}, sampling=SamplingParams(temperature=0.0))
    with RolloutManager(runtime, plan) as manager:
        assert 1 == num_live(manager)
        manager.update_weights(weights_of(1))
        tasks = make_tasks(6)
        finished = manager.iterate(tasks)
        cluster.add_node(num_cpus=1, num_gpus=2)
        wait_until(lambda: num_live(manager) == 2, "no replica joins")
        check_complete(list(finished), tasks)
        results = manager.rollout(make_tasks(12))

        assert {1} == versions_of(results)
        assert all(serving(manager))
        # Turns that are open when the replica joins may move to it, but none is sent again.
        assert 0 == manager.stats()["resent"]
        assert {"CREATED": 2} == groups_by_state()
    assert not groups_by_state()


def test_a_chosen_number_ends_the_growth(cluster):
    """The devices of the replica that has not come are free again."""
    with make_manager(max_replicas=3) as manager:
        wait_until(lambda: groups_by_state() == {"CREATED": 1, "PENDING": 1}, "no further replica is asked for")
        manager.resize(1)
        assert {"CREATED": 1} == groups_by_state()
        cluster.add_node(num_cpus=1, num_gpus=1)
        manager.resize(2)
        assert {"CREATED": 2} == groups_by_state()
        assert 2 == num_live(manager)


AUTOSCALER = {
    "cluster_name": "growth",
    "max_workers": 4,
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0},
        "gpu": {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3},
    },
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 10,
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{f"{kind}_commands": [] for kind in ("initialization", "setup", "head_setup", "worker_setup")},
    **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
    **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    "file_mounts_sync_continuously": False,
}
"""A config of Ray's autoscaler without its provider of nodes."""


@pytest.fixture
def autoscaling_cluster(tmp_path):
    """
    The address of a head without GPUs, whose autoscaler starts nodes with one GPU on this machine.

    `ray.cluster_utils.AutoscalingCluster` would do the same, but stops all clusters of the machine.
    """
    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    provider = {"type": "fake_multinode", "gcs_address": address, "use_node_id_as_ip": True}
    provider |= dict.fromkeys(("disable_node_updaters", "disable_launch_config_check"), True)
    config = tmp_path / "autoscaler.json"
    config.write_text(json.dumps({**AUTOSCALER, "provider": provider}))
    options = ["--head", "--block", f"--port={port}", "--num-cpus=4", "--include-dashboard=false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, f"--autoscaling-config={config}"]
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    with (tmp_path / "log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: "block forever" in (tmp_path / "log").read_text(), "the cluster does not start")
        ray.init(address=address, namespace="turnwise")
        yield address
    finally:
        ray.shutdown()
        processes = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait()
        for process in processes:  # the nodes that the autoscaler has started
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_an_autoscaler_adds_the_nodes(autoscaling_cluster):
    """A run whose cluster has no GPU yet waits for nodes with GPUs, and grows to its limit."""
    with pytest.raises(ConfigError, match="room for 0 of 1"), make_manager():
        pass
    with make_manager(autoscaling=True, max_replicas=2) as manager:
        wait_until(lambda: num_live(manager) == 2, "no replica joins")
        results = manager.rollout(make_tasks(8))
    assert {result.status for result in results} <= FINISHED
