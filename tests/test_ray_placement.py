"""Replicas on the devices of a real Ray cluster of several nodes on this machine: reserved, reused, given back."""

import json
import os
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ray_judge_blueprint import TellingBlueprint

from turnwise import Task
from turnwise.config_parts import Choice
from turnwise.config_runtime import RayConfig, RuntimeConfig
from turnwise.errors import ConfigError, EngineError
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.placement import placement_of_runtime
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLAN = RolloutPlan(default_agent="four", agent_names=frozenset({"four"}))


@pytest.fixture(scope="module")
def cluster():
    """A cluster of a head without devices and two nodes that say they have two GPUs each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("RAY_health_check_period_ms", "500")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        made.nodes = [made.add_node(num_cpus=2, num_gpus=2) for _ in range(2)]
        made.wait_for_nodes()
        yield made
        made.shutdown()


@pytest.fixture
def connected(cluster):
    """This process's own connection, which outlives every run's."""
    import ray

    ray.init(address=cluster.address, namespace="turnwise")
    yield ray
    ray.shutdown()


def manager(blueprint, *, options=None, ray=None, **runtime):
    ray = {"backoff_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 5.0} | (ray or {})
    config = RuntimeConfig(name="ray", ray=RayConfig(**ray), **runtime)
    placement = placement_of_runtime(config, Choice("telling", options or {}))
    return RolloutManager(RayRuntime(blueprint, config, placement=placement), PLAN)


def tasks(count):
    return [Task(messages=({"role": "user", "content": "x"},), uid=f"task{i}", sample_index=i) for i in range(count)]


def notes(folder):
    """What each engine that started said of its place, the newest last."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


def groups_of(ray):
    """Return the placement groups that have not been removed."""
    table = ray.util.placement_group_table()
    return [group for group in table.values() if group["state"] != "REMOVED"]


def wait_until(is_so, timeout_s=40):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def test_replicas_sit_on_their_devices_and_give_them_back(connected, tmp_path):
    """
    Four devices with two a replica make two replicas, each on one node with two devices to see; one that is killed
    comes back to the same place; at the end every device is free.
    """
    blueprint = TellingBlueprint(folder=str(tmp_path))
    with manager(blueprint, options={"tensor_parallel_size": 2}, total_devices=4) as running:
        first = notes(tmp_path)
        seats, places = running.runtime.policy.seats, running.runtime.policy._places
        before = dict(places._groups)
        os.kill(int(connected.get(seats[0].handle.stats.remote())["pid"]), signal.SIGKILL)
        wait_until(lambda: len(notes(tmp_path)) == 3)
        results = running.rollout(tasks(6))
        assert before == places._groups
        assert 2 == len(groups_of(connected))

    assert 2 == len({note["node"] for note in first})
    assert {"0,1"} == {note["devices"] for note in first}
    assert notes(tmp_path)[-1]["node"] in {note["node"] for note in first}
    assert all(len(r.trajectories[0].turns()) == 4 for r in results)
    assert [] == groups_of(connected)
    wait_until(lambda: connected.available_resources().get("GPU") == 4.0)


def test_too_few_devices_are_refused_with_the_arithmetic(connected, tmp_path):
    """
    More than the cluster has, in all or on one node, is a bad config, and nothing is left behind.
    """
    blueprint = TellingBlueprint(folder=str(tmp_path))
    with pytest.raises(
        ConfigError, match="3 x 2 GPU for the replicas of the policy make 6, and the cluster has 4: 2 of"
    ):
        manager(blueprint, options={"tensor_parallel_size": 2}, total_devices=6).start()
    with pytest.raises(ConfigError, match="a replica of the policy needs 4 GPU on one node, and no node"):
        manager(blueprint, options={"tensor_parallel_size": 4}, total_devices=4).start()

    assert [] == groups_of(connected)


def test_devices_that_others_have_are_waited_for_and_no_longer(connected, tmp_path):
    """
    What is not free in time says what was asked and what there is; the reservation is withdrawn.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    others = placement_group([{"GPU": 2}, {"GPU": 1}])
    assert others.wait(20)
    blueprint = TellingBlueprint(folder=str(tmp_path))
    text = (
        r"replica 0 could not be started: PlacementError: no room for a replica of the policy: asked for 2 GPU "
        r"\(STRICT_PACK\), not free within 2 s; the cluster has 8 CPU \+ 4 GPU, of which 8 CPU \+ 1 GPU is free"
    )
    with pytest.raises(EngineError, match=text):
        manager(blueprint, options={"tensor_parallel_size": 2}, ray={"start_timeout_s": 2.0}).start()

    assert 1 == len(groups_of(connected))
    remove_placement_group(others)


def test_a_start_is_tried_again_while_the_port_is_taken(connected):
    """
    A replica whose port another process has comes up once it is free, and otherwise names the reason.
    """
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        blueprint = TellingBlueprint(port=holder.getsockname()[1])
        text = r"replica 0 could not be started: OSError: \[Errno 98\] Address already in use \(2 tries\)"
        with pytest.raises(EngineError, match=text):
            manager(blueprint, ray={"max_starts": 2}).start()

        running = manager(blueprint, ray={"max_starts": 30, "backoff_s": 0.2})
        threading.Thread(target=lambda: (wait_until(lambda: _failed_once(running)), holder.close())).start()
        with running:
            results = running.rollout(tasks(2))

    assert all(len(r.trajectories[0].turns()) == 4 for r in results)


def _failed_once(running):
    return running.runtime.policy.seats[0].failed_starts > 0


def test_replicas_run_under_an_interpreter_of_their_own(cluster, tmp_path):
    """
    Two runs of one process share a cluster that was there before: each has its own replicas, one of them under the
    Python of another environment, and the end of the first is not the end of the second.
    """
    import ray

    python = environment(tmp_path / "venv")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    options = {"address": cluster.address}
    first = manager(TellingBlueprint(folder=str(folders[0])), ray=options)
    second = manager(TellingBlueprint(folder=str(folders[1])), ray={**options, "replica_python": str(python)})
    with second:
        with first:
            here = first.rollout(tasks(4))
        assert ray.is_initialized()
        there = second.rollout(tasks(4))

    assert not ray.is_initialized()
    assert [str(tmp_path / "venv")] == [note["prefix"] for note in notes(folders[1])]
    assert [sys.prefix] == [note["prefix"] for note in notes(folders[0])]
    ids = [[r.trajectories[0].input_ids.tolist() for r in results] for results in (here, there)]
    assert ids[0] == ids[1]


def environment(folder):
    """Make a virtual environment that finds what this one has installed, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    inner = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    paths = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (inner / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in paths))
    return folder / "bin" / "python"


def test_a_replica_whose_node_dies_moves_to_another(cluster, connected, tmp_path):
    """
    With its node a replica loses its place; it is given a new one, and the episodes go on.
    """
    blueprint = TellingBlueprint(folder=str(tmp_path), token_latency_s=0.05)
    with manager(blueprint, options={"tensor_parallel_size": 2}) as running:
        (note,) = notes(tmp_path)
        node = next(each for each in cluster.nodes if each.node_id == note["node"])
        threading.Timer(1.0, lambda: cluster.remove_node(node, allow_graceful=False)).start()
        results = running.rollout(tasks(6))

    assert all(len(r.trajectories[0].turns()) == 4 for r in results)
    assert notes(tmp_path)[-1]["node"] not in ("", note["node"])
    assert [] == groups_of(connected)
