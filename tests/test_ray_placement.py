"""Replicas reserve, reuse and return the devices of a real Ray cluster of several nodes on this machine."""

import json
import os
import signal
import site
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ray_judge_blueprint import TellingBlueprint
from ray_runs import ON_RAY, PLAN, make_tasks, pids, rollout_disturbed, wait_until

from turnwise.config.parts import Choice
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.errors import ConfigError, EngineError
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.placement import plan_runtime_placement
from turnwise.runtime.ray.runtime import RayRuntime

pytestmark = [*ON_RAY, pytest.mark.one_part, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    """A cluster of a head without devices and two nodes that declare two GPUs each."""
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
    """A connection of this process, which outlives the connection of every run."""
    import ray

    ray.init(address=cluster.address, namespace="turnwise")
    yield ray
    ray.shutdown()


def make_manager(blueprint, *, options=None, ray=None, **runtime):
    ray = {"backoff_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 120.0} | (ray or {})
    config = RuntimeConfig(name="ray", ray=RayConfig(**ray), **runtime)
    placement = plan_runtime_placement(config, Choice("telling", options or {}))
    return RolloutManager(RayRuntime(blueprint, config, placement=placement), PLAN)


def notes(folder):
    """Return the note that each started engine wrote about its place, the newest last."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


def groups_of(ray):
    """Return the placement groups that have not been removed."""
    table = ray.util.placement_group_table()
    return [group for group in table.values() if group["state"] != "REMOVED"]


def test_replicas_hold_their_devices_and_return_them(connected, tmp_path):
    """
    Four devices and two per replica make two replicas, each of which sees two devices of one node. A killed replica
    restarts in the same place, and at the end every device is free.
    """
    blueprint = TellingBlueprint(folder=str(tmp_path))
    with make_manager(blueprint, options={"tensor_parallel_size": 2}, total_devices=4) as manager:
        first = notes(tmp_path)
        slots, places = manager.runtime.policy.slots, manager.runtime.policy.placement_groups
        before = dict(places._groups)
        os.kill(pids(slots)[0], signal.SIGKILL)
        wait_until(lambda: len(notes(tmp_path)) == 3, "no replica was restarted")
        results = manager.rollout(make_tasks(6))
        assert before == places._groups
        assert 2 == len(groups_of(connected))

    assert 2 == len({note["node"] for note in first})
    assert {"0,1"} == {note["devices"] for note in first}
    assert notes(tmp_path)[-1]["node"] in {note["node"] for note in first}
    assert all(len(r.trajectories[0].turns()) == 4 for r in results)
    assert [] == groups_of(connected)
    wait_until(lambda: connected.available_resources().get("GPU") == 4.0, "devices are still reserved")


def test_too_few_devices_are_refused_with_the_arithmetic(connected, tmp_path):
    """
    Asking for more devices than the cluster or one node has is a config error, and leaves no reservation.
    """
    blueprint = TellingBlueprint(folder=str(tmp_path))
    with pytest.raises(ConfigError, match=r"a replica of the policy needs a node with 2 GPU, .* has room for 2 of 3"):
        make_manager(blueprint, options={"tensor_parallel_size": 2}, total_devices=6).start()
    with pytest.raises(ConfigError, match=r"a replica of the policy needs a node with 4 GPU, .* has room for 0 of 1"):
        make_manager(blueprint, options={"tensor_parallel_size": 4}, total_devices=4).start()

    assert [] == groups_of(connected)


@pytest.mark.slow
def test_busy_devices_are_waited_for_until_a_deadline(connected, tmp_path):
    """
    The error names the requested and the free devices, and the reservation is withdrawn.
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
        make_manager(blueprint, options={"tensor_parallel_size": 2}, ray={"start_timeout_s": 2.0}).start()

    assert 1 == len(groups_of(connected))
    remove_placement_group(others)


@pytest.mark.slow
def test_a_worker_without_room_is_tried_once(connected, tmp_path):
    """
    The error names the requested and the free resources. A second try would wait as long as the first.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    others = placement_group([{"CPU": 4}])  # only the head is as large
    assert others.wait(20)
    text = (
        r"worker 0 could not be started: PlacementError: no room for a worker: asked for 3 CPU, not free within 15 s; "
        r"the cluster has 8 CPU \+ 4 GPU, of which 4 CPU \+ 4 GPU is free$"
    )
    asked = {"start_timeout_s": 15.0, "worker_resources": {"num_cpus": 3}}
    with pytest.raises(EngineError, match=text):
        make_manager(TellingBlueprint(folder=str(tmp_path)), ray=asked).start()

    remove_placement_group(others)


@pytest.mark.slow
def test_a_start_is_retried_while_the_port_is_taken(connected):
    """
    A replica whose port is taken starts once the port is free; after the last retry the error names the reason.
    """
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        blueprint = TellingBlueprint(port=holder.getsockname()[1])
        text = r"replica 0 could not be started: OSError: \[Errno 98\] Address already in use \(2 tries\)"
        with pytest.raises(EngineError, match=text):
            make_manager(blueprint, ray={"max_starts": 2}).start()

        running = make_manager(blueprint, ray={"max_starts": 30, "backoff_s": 0.2})
        threading.Thread(
            target=lambda: (wait_until(lambda: _failed_once(running), "no start failed"), holder.close())
        ).start()
        with running:
            results = running.rollout(make_tasks(2))

    assert all(len(r.trajectories[0].turns()) == 4 for r in results)


def _failed_once(manager):
    return manager.runtime.policy.slots[0].failed_starts > 0


@pytest.mark.slow
def test_replicas_run_under_another_interpreter(cluster, tmp_path):
    """
    Two runs of one process share an existing cluster. Each has its own replicas; the second run's replicas use the
    Python of another environment, and the second run continues after the first has ended.
    """
    import ray

    python = make_environment(tmp_path / "venv")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    options = {"address": cluster.address}
    first = make_manager(TellingBlueprint(folder=str(folders[0])), ray=options)
    second = make_manager(TellingBlueprint(folder=str(folders[1])), ray={**options, "replica_python": str(python)})
    with second:
        with first:
            here = first.rollout(make_tasks(4))
        assert ray.is_initialized()
        there = second.rollout(make_tasks(4))

    assert not ray.is_initialized()
    assert [str(tmp_path / "venv")] == [note["prefix"] for note in notes(folders[1])]
    assert [sys.prefix] == [note["prefix"] for note in notes(folders[0])]
    ids = [[r.trajectories[0].input_ids.tolist() for r in results] for results in (here, there)]
    assert ids[0] == ids[1]


def make_environment(folder):
    """Make a virtual environment that finds the packages of this one, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    inner = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    paths = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (inner / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in paths))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_a_replica_whose_node_dies_moves_to_another(cluster, connected, tmp_path):
    """
    A replica that loses its node restarts on another one, and the episodes continue.
    """
    blueprint = TellingBlueprint(folder=str(tmp_path), token_latency_s=0.05)
    with make_manager(blueprint, options={"tensor_parallel_size": 2}) as manager:
        (note,) = notes(tmp_path)
        node = next(each for each in cluster.nodes if each.node_id == note["node"])
        results = rollout_disturbed(manager, make_tasks(6), lambda: cluster.remove_node(node, allow_graceful=False))

    assert all(len(r.trajectories[0].turns()) == 4 for r in results)
    assert notes(tmp_path)[-1]["node"] not in ("", note["node"])
    assert [] == groups_of(connected)
