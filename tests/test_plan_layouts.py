"""What `turnwise plan` prints is what Ray then holds: layouts of replicas on a cluster that pretends its devices."""

import asyncio
import json
from pathlib import Path

import pytest
from ray_judge_blueprint import TellingBlueprint
from ray_runs import ON_RAY, PLAN, wait_until

from turnwise.cli import main
from turnwise.config.resolve import load_resolved
from turnwise.errors import ConfigError
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.placement import plan_placement
from turnwise.runtime.ray.placement_groups import PlacementGroups, check_capacity
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.remote.supervision import PlacementError

pytestmark = [*ON_RAY, pytest.mark.one_part]
HERE = Path(__file__).parent

NODES = (
    {"num_cpus": 8, "num_gpus": 8},
    {"num_cpus": 8, "num_gpus": 8},
    {"num_cpus": 4, "num_gpus": 4, "resources": {"fast": 2}},
    {"num_cpus": 16},
)
"""The nodes that declare devices: two whole ones, a smaller one with a resource of its kind, and one without GPUs."""

TP, PP, DP = (f"engine.{name}_parallel_size=" for name in ("tensor", "pipeline", "data"))
DEVICES, REPLICAS = "runtime.total_devices=", "runtime.num_replicas="
OWN = "runtime.ray.replica_resources="
JUDGE = ("judge.engine=vllm", "judge.model.path=package:turnwise_calculator_demo")
LAYOUTS = {
    "one replica": (),
    "four replicas of one device": (f"{DEVICES}4",),
    "as many as there are": (f"{DEVICES}20",),
    "a number of replicas": (f"{REPLICAS}3",),
    "tensor parallel": (f"{TP}2", f"{DEVICES}8"),
    "as many pairs as there are": (f"{TP}2", f"{DEVICES}20"),
    "five groups of four, which fill every node": (f"{TP}4", f"{DEVICES}20"),
    "one replica fills a node": (f"{TP}8", f"{DEVICES}8"),
    "two replicas fill two nodes": (f"{TP}8", f"{DEVICES}16"),
    "pipeline parallel": (f"{PP}2", f"{DEVICES}4"),
    "tensor and pipeline parallel": (f"{TP}2", f"{PP}2", f"{DEVICES}12"),
    "data parallel": (f"{DP}2", f"{DEVICES}6"),
    "all three": (f"{TP}2", f"{PP}2", f"{DP}2", f"{DEVICES}8"),
    "three devices": (f"{TP}3", f"{DEVICES}15"),
    "larger than a node": (f"{TP}8", f"{PP}2", f"{DEVICES}16"),
    "larger than a node of four": (f"{TP}4", f"{PP}2", f"{DEVICES}16", "runtime.ray.devices_per_node=4"),
    "larger than any node": (f"{TP}4", f"{PP}5", f"{DEVICES}20"),
    "half a device": (f"{OWN}{{num_gpus: 0.5}}", f"{REPLICAS}8"),
    "a quarter of a device": (f"{OWN}{{num_gpus: 0.25}}", f"{REPLICAS}5"),
    "no device, although it is parallel": (f"{TP}2", f"{OWN}{{num_gpus: 0}}", f"{REPLICAS}2"),
    "CPUs beside a device": (f"{OWN}{{num_cpus: 2}}", f"{DEVICES}4"),
    "CPUs and a resource": (f"{TP}2", f"{OWN}{{num_cpus: 1, resources: {{fast: 1}}}}", f"{DEVICES}4"),
    "CPUs, larger than a node": (f"{TP}8", f"{PP}2", f"{OWN}{{num_cpus: 3}}", f"{DEVICES}16"),
    "on CPUs, which it reserves": ("runtime.device=cpu", f"{TP}4", f"{DEVICES}16"),
    "on CPUs, which it does not reserve": ("runtime.device=cpu", f"{REPLICAS}4"),
    "on a CPU, with more of them": ("runtime.device=cpu", f"{OWN}{{num_cpus: 3}}", f"{REPLICAS}4"),
    "with a judge": (*JUDGE, f"{TP}2", f"{DEVICES}8", "judge.pool.total_devices=4"),
    "with a parallel judge": (*JUDGE, "judge.engine.tensor_parallel_size=4", "judge.pool.total_devices=8"),
    "with a judge that has half a device": (*JUDGE, "judge.pool.replica_resources={num_gpus: 0.5}"),
    "with a judge on CPUs": (*JUDGE, "judge.pool.device=cpu", "judge.pool.replica_resources={num_cpus: 2}"),
}
"""Overrides of each layout."""

REFUSED = {
    "more devices than there are": (
        (f"{TP}8", f"{DEVICES}24"),
        "needs a node with 8 GPU, and the cluster has room for 2 of 3",
    ),
    "no node is large enough": (
        (f"{TP}8", f"{PP}2", f"{DEVICES}16", "runtime.ray.devices_per_node=16"),
        "needs a node with 16 GPU, and the cluster has room for 0 of 1",
    ),
    "no room on single nodes": (
        (f"{TP}6", f"{DEVICES}18"),
        "needs a node with 6 GPU, and the cluster has room for 2 of 3",
    ),
    "no node has the label": (
        (f"{OWN}{{labels: {{pool: fast}}}}", f"{DEVICES}1"),
        "needs a node with pool=fast, 1 GPU, and the cluster has room for 0 of 1",
    ),
    "more of a resource than there is": (
        (f"{OWN}{{resources: {{fast: 3}}}}", f"{DEVICES}1"),
        "needs a node with 1 GPU, 3 fast, and the cluster has room for 0 of 1",
    ),
}
STARTED = ("tensor parallel", "half a device", "CPUs and a resource", "CPUs beside a device")
"""Layouts that are started with workers; the others are only reserved, by the code that starting calls."""


@pytest.fixture(scope="module")
def cluster():
    """A connection to the nodes, and to a head without any device."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for node in NODES:
            made.add_node(**node)
        made.wait_for_nodes()
        ray.init(address=made.address, namespace="turnwise")
        yield ray
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def printed(capsys, monkeypatch):
    """A function that returns the JSON that `turnwise plan` prints for a layout, and the config of a run."""
    monkeypatch.chdir(HERE.parent)
    config = "examples/calculator_vllm.yaml"

    def plan(*overrides):
        changes = ["runtime.device=gpu", "runtime.ray.replica_python=null", *overrides]
        assert 0 == main(["plan", config, *changes, "--json", "--placement-only"])
        return json.loads(capsys.readouterr().out), load_resolved(config, changes)[0]

    return plan


def held(ray):
    """Return the resources that are reserved now, and their placement groups by name."""
    total, free = ray.cluster_resources(), ray.available_resources()
    names = [name for name in total if name in ("CPU", "GPU", "fast")]
    amounts = {name: round(total[name] - free.get(name, 0.0), 4) for name in names}
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
    return {name: amount for name, amount in amounts.items() if amount}, {group["name"]: group for group in groups}


def check_groups(plan, groups):
    """Each replica has a group, with the bundles and the strategy that were printed, on one node if it is strict."""
    expected = [
        (f"{pool['name']}-{index}", pool)
        for pool in plan["pools"]
        for index in range(pool["num_replicas"])
        if pool["bundles"]
    ]
    assert sorted(name for name, _pool in expected) == sorted(name.split("-", 2)[2] for name in groups)
    by_replica = {name.split("-", 2)[2]: group for name, group in groups.items()}
    for name, pool in expected:
        group = by_replica[name]
        bundles = [dict(bundle) for _index, bundle in sorted(group["bundles"].items())]
        assert pool["bundles"] == bundles
        assert pool["strategy"] == group["strategy"]
        nodes = set(group["bundles_to_node_id"].values())
        assert pool["strategy"] != "STRICT_PACK" or len(nodes) == 1


async def reserve(placement, timeout_s=60.0, run_name="layout"):
    """Reserve the replicas of a layout as a run does when it starts them."""
    pools = [PlacementGroups(pool, run_name) for pool in placement.pools]
    try:
        for groups in pools:
            for index in range(groups.pool.num_replicas):
                await groups.actor_options(index, timeout_s)
    except BaseException:
        for groups in pools:
            await groups.close()
        raise
    return pools


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ray_holds_what_the_plan_prints(cluster, printed, name):
    """The sum of all resources, and for each replica its bundles and their nodes. All of it is free at the end."""
    plan, config = printed(*LAYOUTS[name])
    placement = plan_placement(config)
    check_capacity(placement, cluster.nodes())

    pools = asyncio.run(reserve(placement))
    try:
        wait_until(lambda: plan["needs"] == held(cluster)[0], f"{plan['needs']} != {held(cluster)[0]}", 60)
        check_groups(plan, held(cluster)[1])
    finally:
        for groups in pools:
            asyncio.run(groups.close())

    wait_until(lambda: held(cluster) == ({}, {}), "something is still reserved", 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_a_started_run_holds_what_the_plan_prints(cluster, printed, name, tmp_path):
    """With its workers, and every replica sees as many devices as were printed."""
    plan, config = printed(*LAYOUTS[name], "runtime.num_workers=2", "runtime.ray.worker_resources={num_cpus: 0.5}")
    assert {"count": 2, "resources_each": {"CPU": 0.5}, "labels": {}} == plan["workers"]

    blueprint = TellingBlueprint(folder=str(tmp_path))
    with RolloutManager(RayRuntime(blueprint, config.runtime, placement=plan_placement(config)), PLAN):
        wait_until(lambda: plan["needs"] == held(cluster)[0], f"{plan['needs']} != {held(cluster)[0]}", 60)
        check_groups(plan, held(cluster)[1])
        notes = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]

    policy = plan["pools"][0]
    devices = sorted(len(note["devices"].split(",")) for note in notes)
    assert [max(1, int(policy["devices_per_replica"]))] * policy["num_replicas"] == devices
    wait_until(lambda: held(cluster) == ({}, {}), "something is still reserved", 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_layout_that_cannot_fit_is_refused(cluster, printed, name):
    """The arithmetic is in the error, and nothing is reserved."""
    overrides, text = REFUSED[name]
    _plan, config = printed(*overrides)
    placement = plan_placement(config)

    with pytest.raises(ConfigError, match=text):
        check_capacity(placement, cluster.nodes())
    assert ({}, {}) == held(cluster)


@pytest.mark.slow
def test_a_layout_whose_devices_are_taken_is_given_up(cluster, printed):
    """Two replicas of six devices fit the nodes with eight, but another run holds sixteen devices."""
    plan, config = printed(f"{TP}6", f"{DEVICES}12")
    placement = plan_placement(config)
    _plan, other = printed(f"{TP}4", f"{DEVICES}16")
    check_capacity(placement, cluster.nodes())

    assert 2 == plan["num_gpu_nodes"]
    taken = asyncio.run(reserve(plan_placement(other), run_name="other"))
    try:
        with pytest.raises(PlacementError, match="asked for 6 GPU"):
            asyncio.run(reserve(placement, 2.0))
    finally:
        for groups in taken:
            asyncio.run(groups.close())
    wait_until(lambda: held(cluster) == ({}, {}), "something is still reserved", 60)
