"""Several training processes on the devices of the replicas, on a real Ray cluster that pretends to have two GPUs."""

from __future__ import annotations

import pytest
from ray_runs import ON_RAY
from training_site import make_site, steps_of, train

pytestmark = ON_RAY


@pytest.fixture
def site(tmp_path):
    """A folder to train in."""
    return make_site(tmp_path)


@pytest.fixture
def address(site, monkeypatch):
    """The address of a cluster with two GPUs, whose processes import the plugin of the site."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(site))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


@pytest.mark.slow
def test_two_processes_share_the_gpus_of_two_replicas(site, address):
    """All GPUs are reserved by replicas; the training starts nevertheless, and continues after its first step."""
    shared = (
        "memory.mode=hybrid",
        "runtime.name=ray",
        "runtime.num_replicas=2",
        "runtime.num_workers=1",
        "runtime.device=gpu",
        f"runtime.ray.address={address}",
        "train.sharding.num_processes=2",
        "train.sharding.gpus_per_process=1",
        "train.sharding.cpus_per_process=0",
        "train.sharding.num_threads=1",
    )
    out = train(site, "out", *shared, "train.num_steps=1")
    train(site, "out", *shared, "train.num_steps=2", "--resume")

    trained = [line for line in steps_of(out) if "reward/mean" in line]
    assert [1, 2] == [line["step"] for line in trained]
    assert all("switch/wake_up_kv_cache_s" in line for line in trained)
