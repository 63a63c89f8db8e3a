"""A replica with devices on several nodes of a Ray cluster: a server for each node, and one end for all of them."""

import json
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from turnwise.errors import EngineError
from turnwise_sglang_engine import SglangConfig
from turnwise_sglang_engine.loading import pickle_tensors
from turnwise_sglang_engine.nodes import check_division

on_ray = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a GPU each, and one with two. Ray only counts them."""
    import ray
    from ray.cluster_utils import Cluster

    here = Path(__file__).parent
    paths = [str(here), str(here / "fake_sglang"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths).rstrip(os.pathsep))
        patch.syspath_prepend(str(here))
        head = {"num_cpus": 2, "num_gpus": 1, "resources": {"single": 1}, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        made.add_node(num_cpus=2, num_gpus=1, resources={"single": 1})
        made.add_node(num_cpus=2, num_gpus=2, resources={"double": 2})
        made.wait_for_nodes()
        ray.init(address=made.address)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def start_replica(cluster, small_model, tmp_path):
    """A function that starts a replica on two devices, and returns its actor and the error of its start."""
    import ray
    from node_replica import Replica
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    groups = []

    def start(kind="single", mood="", **options):
        group = placement_group([{"GPU": 1, kind: 1}] * 2, strategy="PACK")
        groups.append(group)
        ray.get(group.ready(), timeout=TIMEOUT_S)
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        environment = {"FAKE_SGLANG_NOTES": str(tmp_path), "FAKE_SGLANG": mood}
        actor = ray.remote(Replica).options(
            num_cpus=0, scheduling_strategy=strategy, runtime_env={"env_vars": environment}
        )
        options = {"model": small_model, "device": "cuda", "max_context": 256, "tensor_parallel_size": 2, **options}
        replica = actor.remote(options)
        return replica, ray.get(replica.start.remote(), timeout=TIMEOUT_S)

    yield start
    for group in groups:
        remove_placement_group(group)


def notes(folder):
    """Return what each server was started with, by its process id."""
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def wait_for_end(processes):
    """Wait until processes have ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(psutil.pid_exists(each) and psutil.Process(each).status() != "zombie" for each in processes):
        assert time.monotonic() < deadline, "a server is still there"
        time.sleep(0.05)


class TestOnTwoNodes:
    """Bundles on two nodes."""

    pytestmark = on_ray

    def test_each_node_has_a_server(self, start_replica, tmp_path):
        """They meet at one address, serve, load new weights, and end with the engine."""
        import ray

        replica, error = start_replica()
        assert error == ""
        servers = notes(tmp_path)
        first, second = sorted(servers.values(), key=lambda each: each["node_rank"])
        assert (2, 0, 2) == (first["nnodes"], first["node_rank"], first["tp_size"])
        assert first | {"node_rank": 1} == second
        assert ("0", "0") == (first["gpus"], second["blocks"])

        assert (5, 0) == ray.get(replica.generate.remote(5), timeout=TIMEOUT_S)
        weights = {"a.weight": np.ones((2, 3), np.float32), "b.weight": np.ones(4, np.float32)}
        ray.get(replica.update.remote(weights, 3), timeout=TIMEOUT_S)
        assert (5, 3) == ray.get(replica.generate.remote(5), timeout=TIMEOUT_S)

        ray.get(replica.stop.remote(), timeout=TIMEOUT_S)
        wait_for_end(servers)

    def test_a_dead_server_of_another_node_ends_the_replica(self, start_replica, tmp_path):
        """Running and later requests raise, and the engine's own server ends."""
        import ray

        replica, error = start_replica()
        assert error == ""
        servers = notes(tmp_path)
        (follower,) = [process for process, about in servers.items() if about["node_rank"]]
        running = replica.generate.remote(200)
        os.kill(follower, signal.SIGKILL)
        wait_for_end(servers)

        expected = "ReplicaDiedError: SGLang's process on another node died: it left no error"
        found = ray.get([running, replica.generate.remote(5)], timeout=TIMEOUT_S)
        assert [expected] * 2 == found

    @pytest.mark.parametrize("victim", ["the replica", "the first server"])
    def test_the_servers_end_with_the_replica(self, start_replica, tmp_path, victim):
        """Even if the replica or its own server is killed."""
        import ray

        replica, error = start_replica()
        assert error == ""
        servers = notes(tmp_path)
        if victim == "the replica":
            ray.kill(replica)
        else:
            os.kill(ray.get(replica.own_server.remote(), timeout=TIMEOUT_S), signal.SIGKILL)

        wait_for_end(servers)

    def test_a_failed_start_on_another_node_has_a_cause(self, start_replica, tmp_path):
        """The error says that it was not the own node, and no server stays."""
        _, error = start_replica(mood="die on another node")

        expected = "EngineError: on another node: SGLang did not start: ValueError: this model cannot be loaded"
        assert expected == error
        wait_for_end(notes(tmp_path))

    def test_bundles_of_one_node_need_one_server(self, start_replica, tmp_path):
        """It gets the devices of all bundles, and does not wait for other nodes."""
        import ray

        replica, error = start_replica("double")
        assert error == ""
        (server,) = notes(tmp_path).values()
        assert (None, ["0", "1"]) == (server["nnodes"], sorted(server["gpus"].split(",")))
        assert (5, 0) == ray.get(replica.generate.remote(5), timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("options", "per_node", "message"),
    [
        ({"tensor_parallel_size": 8}, [5, 3], "as many devices on each node, and the nodes of this replica have 5, 3"),
        ({"data_parallel_size": 2}, [1, 1], "all copies of data_parallel_size on one node.*on 2 nodes"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 3}, [2, 2, 2], "2 pipeline stages over 3 nodes"),
    ],
)
def test_some_divisions_are_refused(options, per_node, message):
    """SGLang divides the model evenly, and copies not at all."""
    with pytest.raises(EngineError, match=message):
        check_division(SglangConfig(**options), per_node)


def test_tensors_for_other_nodes_carry_only_their_own_bytes():
    """The tensors of a bucket are views of one storage, which a plain pickle would repeat for each."""
    flat = torch.arange(100_000, dtype=torch.float32)
    tensors = [("a", flat[:6].view(2, 3)), ("b", flat[50_000:50_004])]

    data = pickle_tensors(tensors)

    assert len(data) < 10_000
    assert [(name, tensor.tolist()) for name, tensor in tensors] == [
        (name, tensor.tolist()) for name, tensor in pickle.loads(data)
    ]


@pytest.mark.parametrize(
    ("options", "per_node"),
    [
        ({"tensor_parallel_size": 16}, [8, 8]),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, [8, 8]),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 4}, [16, 16]),
        ({"data_parallel_size": 8}, [8]),
    ],
)
def test_even_divisions_are_accepted(options, per_node):
    """By devices, by stages, or by both; one node has any."""
    check_division(SglangConfig(**options), per_node)
