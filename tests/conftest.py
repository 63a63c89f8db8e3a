"""The folder of the tests on the path, and one Ray cluster for all tests that need no separate cluster."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)  # the blueprints are imported by name, here and in every actor


@pytest.fixture(scope="session")
def ray_head() -> Iterator[str]:
    """The address of a Ray node on loopback that outlives the connections of single modules."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def ray_cluster(ray_head: str) -> Iterator[None]:
    """A connection to that node: starting a node takes seconds, connecting to one does not."""
    import ray
    from actor_coverage import make_runtime_env

    ray.init(address=ray_head, namespace="turnwise", runtime_env=make_runtime_env(HERE))
    yield
    ray.shutdown()
