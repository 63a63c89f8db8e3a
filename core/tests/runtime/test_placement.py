"""Placement of replicas: the arithmetic of devices, its errors, and the needs of a cluster."""

import re
import sys

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.run import Choice, DataConfig, JudgeConfig, RunConfig
from turnwise.config.runtime import PoolConfig, RayConfig, RuntimeConfig
from turnwise.errors import ConfigError
from turnwise.runtime.placement import check_interpreters, parse_address, plan_placement
from turnwise.runtime.ray.placement_groups import check_capacity

SMALL = st.integers(min_value=1, max_value=8)


def run_config(options=None, *, judge=None, ray=None, reward=None, **runtime):
    """Return a resolved config whose engine has these options."""
    return RunConfig(
        data=DataConfig(path="tasks.jsonl"),
        agent=Choice("single_turn"),
        engine=Choice("vllm", options or {}),
        judge=judge,
        reward=reward,
        runtime=RuntimeConfig(**{"name": "ray", "ray": RayConfig(**(ray or {})), **runtime}),
    )


def policy(*arguments, **named):
    return plan_placement(run_config(*arguments, **named)).pools[0]


@given(tensor=SMALL, data=SMALL, pipeline=SMALL, replicas=SMALL)
def test_devices_determine_the_number_of_replicas(tensor, data, pipeline, replicas):
    """
    num_replicas = total_devices // (TP * DP * PP), and the bundles of all replicas hold exactly these devices.
    """
    sizes = {"tensor_parallel_size": tensor, "data_parallel_size": data, "pipeline_parallel_size": pipeline}
    size = tensor * data * pipeline

    pool = policy(sizes, total_devices=replicas * size)

    assert replicas == pool.num_replicas
    assert replicas * size == sum(bundle["GPU"] for bundle in pool.bundles) * pool.num_replicas
    assert sum(bundle["GPU"] for bundle in pool.bundles) * pool.num_replicas == replicas * size


@given(tensor=st.integers(min_value=2, max_value=8), replicas=SMALL, rest=st.integers(min_value=1, max_value=7))
def test_a_number_of_devices_that_does_not_divide_is_rejected(tensor, replicas, rest):
    """The error names the nearest numbers that divide."""
    total = replicas * tensor + rest % tensor
    if total % tensor == 0:
        return
    with pytest.raises(ConfigError) as raised:
        policy({"tensor_parallel_size": tensor}, total_devices=total)

    text = str(raised.value)
    assert text.startswith(f"runtime.total_devices: {total} does not divide by the {tensor} devices of one replica")
    assert f"{replicas * tensor} would make {replicas} replica" in text
    assert f"{(replicas + 1) * tensor} would make {replicas + 1} replicas" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("options", "runtime", "text"),
    [
        (
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
            {"total_devices": 4},
            "runtime.total_devices: 4 is less than the 8 devices of one replica "
            "(tensor_parallel_size 4 * pipeline_parallel_size 2)",
        ),
        (
            {"tensor_parallel_size": 2},
            {"total_devices": 8, "num_replicas": 3},
            "runtime.num_replicas: 3 contradicts total_devices: 8 devices // the 2 devices of one replica "
            "(tensor_parallel_size 2) make 4 replicas; leave one of the two out",
        ),
        (
            {"tensor_parallel_size": 2},
            {"ray": {"replica_resources": {"num_gpus": 3}}},
            "runtime.ray.replica_resources.num_gpus: 3 contradicts the 2 devices of one replica "
            "(tensor_parallel_size 2); leave it out",
        ),
        (
            {},
            {"name": "local", "total_devices": 2},
            "runtime.total_devices: makes 2 replicas, and the runtime local has one; set runtime.name to ray",
        ),
        (
            {},
            {"reward_workers": 2},
            "runtime.reward_workers: there is no reward to score with; set reward or group_reward, "
            "or reward_workers to 0",
        ),
    ],
)
def test_contradictions_have_one_line(options, runtime, text):
    """The error names the keys and shows the arithmetic."""
    with pytest.raises(ConfigError) as raised:
        plan_placement(run_config(options, **runtime))

    assert text == str(raised.value)


@pytest.mark.parametrize(
    "rewards",
    [
        {"reward": Choice("exact")},
        {"group_reward": Choice("relative")},
        {"reward": Choice("exact"), "group_reward": Choice("relative")},
    ],
)
def test_reward_workers_score_episodes_or_groups(rewards):
    """A reward, a group reward or both are enough for reward workers, which are placed like workers."""
    config = evolve(run_config(reward_workers=2), **rewards)

    assert 2 == plan_placement(config).reward_workers


def test_the_judge_has_its_own_arithmetic():
    """The judge has its own devices, and its errors name its own keys."""
    judge = JudgeConfig(engine=Choice("vllm", {"tensor_parallel_size": 4}), pool=PoolConfig(total_devices=8))
    placement = plan_placement(run_config({"tensor_parallel_size": 1}, judge=judge, total_devices=2))

    assert [("policy", 2, 1.0), ("judge", 2, 4.0)] == [(p.name, p.num_replicas, p.num_devices) for p in placement.pools]
    assert placement.needs == {"GPU": 10.0}

    with pytest.raises(ConfigError, match=r"judge.pool.total_devices: 6 does not divide"):
        plan_placement(run_config(judge=JudgeConfig(engine=judge.engine, pool=PoolConfig(total_devices=6))))


def test_a_replica_larger_than_a_node_has_a_bundle_for_each_device():
    """A replica that fits one node has one bundle, which Ray never splits over nodes."""
    small = policy({"tensor_parallel_size": 8})
    large = policy({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, ray={"replica_resources": {"num_cpus": 4}})
    half = policy({"tensor_parallel_size": 8}, ray={"devices_per_node": 4})

    assert (({"GPU": 8.0},), "STRICT_PACK") == (small.bundles, small.strategy)
    assert ({"GPU": 1.0, "CPU": 4.0}, *({"GPU": 1.0},) * 15) == large.bundles
    assert ("PACK", 8) == (half.strategy, len(half.bundles))


def test_engines_without_parallel_sizes_run_on_cpus_by_default():
    """They reserve nothing; `total_devices` counts CPUs, or GPUs if the config asks for GPUs."""
    assert () == policy().bundles
    assert (3, ({"CPU": 1.0},)) == (policy(total_devices=3).num_replicas, policy(total_devices=3).bundles)
    assert ({"CPU": 2.0},) == policy(ray={"replica_resources": {"num_cpus": 2}}).bundles
    assert ({"GPU": 1.0},) == policy(total_devices=3, device="gpu").bundles
    assert ({"GPU": 0.5, "CPU": 1.0},) == policy(ray={"replica_resources": {"num_gpus": 0.5, "num_cpus": 1}}).bundles
    assert () == policy({"tensor_parallel_size": 2}, device="cpu").bundles


def nodes(*resources, labels=()):
    return [{"Alive": True, "Resources": each, "Labels": dict(labels)} for each in resources]


def test_a_small_cluster_is_rejected_before_anything_starts():
    """The check counts all nodes, the largest node, and no dead node."""
    asked = plan_placement(run_config({"tensor_parallel_size": 4}, total_devices=8))

    check_capacity(asked, nodes({"GPU": 4.0, "CPU": 8.0}, {"GPU": 4.0}))
    with pytest.raises(ConfigError, match=r"^a replica of the policy needs a node with 4 GPU, .* has room for 1 of 2;"):
        check_capacity(asked, [*nodes({"GPU": 4.0}), {"Alive": False, "Resources": {"GPU": 8.0}}])
    with pytest.raises(ConfigError, match=r"^a replica of the policy needs a node with 4 GPU, .* has room for 0 of 2;"):
        check_capacity(asked, nodes({"GPU": 3.0}, {"GPU": 3.0}, {"GPU": 3.0}))
    many = plan_placement(run_config(num_workers=6, ray={"worker_resources": {"num_cpus": 1}}))
    with pytest.raises(ConfigError, match=r"^a worker needs a node with 1 CPU, .* has room for 4 of 6;"):
        check_capacity(many, nodes({"CPU": 4.0}))
    both = plan_placement(run_config(num_workers=2, total_devices=3, ray={"worker_resources": {"num_cpus": 1}}))
    with pytest.raises(ConfigError, match=r"^the run needs 5 CPU in all, and the cluster has 4"):
        check_capacity(both, nodes({"CPU": 4.0}))


def test_replicas_that_fit_the_cluster_but_not_its_nodes_are_rejected():
    """Three replicas of six devices need three nodes with six; a replica on several nodes may use the rest of them."""
    unequal = nodes({"GPU": 8.0}, {"GPU": 8.0}, {"GPU": 4.0})
    with pytest.raises(ConfigError, match=r"needs a node with 6 GPU, and the cluster has room for 2 of 3;"):
        check_capacity(plan_placement(run_config({"tensor_parallel_size": 6}, total_devices=18)), unequal)
    check_capacity(plan_placement(run_config({"tensor_parallel_size": 6}, total_devices=12)), unequal)
    large = run_config({"tensor_parallel_size": 4, "pipeline_parallel_size": 5}, total_devices=20)
    check_capacity(plan_placement(large), unequal)
    with pytest.raises(ConfigError, match=r"needs a node with 1 GPU, and the cluster has room for 16 of 20;"):
        check_capacity(plan_placement(large), unequal[:2])


LABELS = {
    "x": {"zone": "x"},
    "none": {},
    "one of two": {"zone": "in(x, y)"},
    "another": {"zone": "!z"},
    "none of two": {"zone": "!in(y, z)"},
}


@pytest.mark.parametrize("selector", LABELS.values(), ids=LABELS)
def test_only_nodes_with_the_labels_have_room(selector):
    """Resources of other nodes do not count for replicas, nor for workers that reserve nothing."""
    asked = {"num_gpus": 1, "labels": selector}
    placement = plan_placement(run_config(num_replicas=2, device="gpu", ray={"replica_resources": asked}))
    workers = plan_placement(run_config(num_workers=2, ray={"worker_resources": {"labels": selector}}))
    fitting = nodes({"GPU": 2.0}, labels={"zone": "x"})
    others = nodes({"GPU": 1.0}, {"GPU": 4.0}, labels={"zone": "z"})

    for asking in (placement, workers):
        check_capacity(asking, [*others, *fitting])
        if selector:
            (asked_for,) = selector.values()
            with pytest.raises(ConfigError, match=rf"needs a node with zone={re.escape(asked_for)}.* room for 0 of 2"):
                check_capacity(asking, others)


def test_an_interpreter_with_a_slash_is_a_path_beside_the_config(tmp_path):
    """Its links are kept: the interpreter of a virtual environment links to one without its packages."""
    (tmp_path / "python").symlink_to(sys.executable)
    config = evolve(run_config(ray={"replica_python": "./python"}), base_dir=tmp_path)

    assert str(tmp_path / "python") == plan_placement(config).pools[0].python
    assert "python3" == policy(ray={"replica_python": "python3"}).python


def test_a_missing_interpreter_is_rejected_if_the_run_starts_ray(tmp_path):
    """
    A path must be an executable file, and a bare name must be on the PATH. The check applies neither to a running
    cluster, whose nodes may differ, nor to the local runtime.
    """

    def check(**options):
        check_interpreters(plan_placement(run_config(**options)))

    (tmp_path / "notes").write_text("no program")
    for missing in (tmp_path / "python", tmp_path, tmp_path / "notes"):
        with pytest.raises(ConfigError, match=r"runtime\.ray\.replica_python: '.*' is not an executable file; create"):
            check(ray={"replica_python": str(missing)})
    with pytest.raises(ConfigError, match=r"runtime\.ray\.replica_python: 'no-such-python' is not on the PATH"):
        check(ray={"replica_python": "no-such-python", "address": "local"})
    with pytest.raises(ConfigError, match=r"judge\.pool\.replica_python: '/nope' is not an executable file"):
        check(judge=JudgeConfig(engine=Choice("vllm"), pool=PoolConfig(replica_python="/nope")))

    check(ray={"replica_python": sys.executable})
    check(ray={"replica_python": "/nope", "address": "10.0.0.1:6379"})
    check(ray={"replica_python": "/nope"}, name="local")


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("auto", None),
        ("local", None),
        ("head:6379", ("head", 6379)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:6379", ("::1", 6379)),
        ("ray://head.example.org:10001", ("head.example.org", 10001)),
    ],
)
def test_every_form_of_an_address_is_parsed(address, place):
    """`auto` and `local` have no host and no port."""
    assert place == parse_address(address)
    assert address == plan_placement(run_config(ray={"address": address})).address


@pytest.mark.parametrize(
    "address", ["", "nonsense", "host:port", "head:0", "head:65536", "head:", ":6379", "::1:6379", "http://head:8265"]
)
def test_an_invalid_address_is_rejected(address):
    """The error names the valid forms; the local runtime ignores the address."""
    with pytest.raises(ConfigError) as raised:
        plan_placement(run_config(ray={"address": address}))

    assert f"runtime.ray.address: expected host:port, ray://host:port, auto or local, got {address!r}" == str(
        raised.value
    )
    assert plan_placement(run_config(ray={"address": address}, name="local")).address is None
