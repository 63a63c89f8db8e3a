"""Faults that span a cluster: a lost node, an interrupted driver, stragglers, and a soak of many faults."""

import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from ray_blueprint import ScriptedBlueprint
from ray_runs import (
    FINISHED,
    ON_RAY,
    check_complete,
    ids_by_task,
    locate_workers,
    make_manager,
    make_tasks,
    rollout_held,
    wait_until,
)

from turnwise import Status
from turnwise.record.invariants import check_trajectory
from turnwise_result_files import load_unfinished, read_results, save_unfinished
from turnwise_testing.whole_runs.scripted_run import SITE, write_scripted_run

ROOT = Path(__file__).parents[1]

pytestmark = [*ON_RAY, pytest.mark.slow]


@pytest.fixture
def two_nodes(monkeypatch):
    """
    Two Ray nodes on this machine, each with room for two replicas; yields the cluster and the node that a test removes.

    That node has no CPUs, so workers run on the other one.
    """
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # the actors import the blueprint from there
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"room": 2}})
    second = cluster.add_node(num_cpus=0, resources={"room": 2})
    ray.init(address=cluster.address, namespace="turnwise")
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def test_a_lost_node_costs_nothing(two_nodes):
    """
    A lost node takes its two replicas with it in mid-generation, and all episodes finish elsewhere with the same ids.
    """
    cluster, second = two_nodes
    options = {"replica_resources": {"resources": {"room": 1}}, "start_timeout_s": 120.0}
    options |= {"worker_resources": {"num_cpus": 0.1}, "window": 4}  # most episodes start after the first result
    with make_manager(ScriptedBlueprint(token_latency_s=0.01), replicas=4, **options) as manager:
        undisturbed = ids_by_task(manager.rollout(make_tasks(60)))
        stream = manager.iterate(make_tasks(60))
        results = [next(stream)]
        cluster.remove_node(second, allow_graceful=False)
        results += list(stream)
        stats = manager.stats()

    check_complete(results, make_tasks(60))
    assert {result.status for result in results} <= FINISHED
    assert ids_by_task(results) == undisturbed
    assert stats["migrations"] > 0, "the lost node served no episode"


def test_a_lost_node_with_two_workers_blames_no_episode(two_nodes, tmp_path):
    """
    One worker of the lost node holds an episode, and the other one is idle: the episode must not be given to it, lose
    this worker too, and fail as if it had killed both.
    """
    cluster, _second = two_nodes
    third = [cluster.add_node(num_cpus=2, resources={"seat": 4}) for _ in range(2)]
    options = {"replica_resources": {"resources": {"room": 1}}, "start_timeout_s": 120.0}
    options |= {"worker_resources": {"resources": {"seat": 1}}}
    tasks = make_tasks(3)
    with make_manager(ScriptedBlueprint(folder=str(tmp_path)), workers=4, **options) as manager:
        located = locate_workers(manager)
        lost = next(node for node in third if node.node_id == located[3])  # the last worker gets no episode
        assert located.count(lost.node_id) == 2

        def lose():
            cluster.remove_node(lost, allow_graceful=False)
            slots = manager.runtime.workers.slots
            wait_until(lambda: sum(slot.num_starts for slot in slots) == 6, "not both workers were lost")

        results = rollout_held(manager, tasks, lose)
        stats = manager.stats()

    check_complete(results, tasks)
    assert {result.status for result in results} <= FINISHED
    assert (stats["quarantined"], stats["worker_restarts"]) == (0, 2)


def test_stragglers_and_hanging_tools(ray_cluster, tmp_path):
    """
    A call returns without the episodes whose tool hangs; the driver keeps their tokens, and a later run finishes them.
    """
    tasks = [*make_tasks(18), *make_tasks(2, "tool-hangs")]
    with make_manager(ScriptedBlueprint(tool_call_s=60.0)) as manager:
        first = manager.rollout(tasks, min_fraction=0.9)
        left = manager.unfinished
        save_unfinished(tmp_path / "unfinished.jsonl", left)

    check_complete(first, tasks[:18])
    assert {each.spec.task.uid for each in left} == {"tool-hangs0", "tool-hangs1"}
    assert all(each.trajectories or each.turns for each in left)
    with make_manager(ScriptedBlueprint(tool_call_s=1.0)) as manager:  # other processes, where the call times out
        later = manager.rollout([], resume=load_unfinished(tmp_path / "unfinished.jsonl"))

    check_complete(later, tasks[18:])
    for before, after in zip(left, later, strict=True):
        kept = before.trajectories[0].input_ids.tolist()
        assert after.trajectories[0].input_ids[: len(kept)].tolist() == kept
        assert after.metrics.num_tool_errors == 3


# An interrupted driver


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A folder with a plugin, a tokenizer, 40 rows and a config for the runtime `ray`."""
    write_scripted_run(
        tmp_path,
        num_tasks=40,
        engine={"name": "scripted", "token_latency_s": 0.15, "mean_tokens": 20},
        agent={"name": "once", "max_tokens": 40},
        rollout={"prompt_length": 64, "response_length": 64, "max_in_flight": 16},
        runtime={"name": "ray", "num_workers": 2, "num_replicas": 2},
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / SITE))
    monkeypatch.syspath_prepend(str(tmp_path / SITE))
    return tmp_path


@contextmanager
def rollout_process(folder, *arguments):
    """`turnwise rollout` in a child process, which is killed afterwards with all that it started."""
    log = folder / "log"
    command = [sys.executable, "-m", "turnwise.cli", "rollout", *arguments]
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=folder, stdout=stream, stderr=stream)
    try:
        yield process
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def test_an_interrupted_driver_keeps_everything(run_dir):
    """
    Ctrl-C under Ray: exit code 130, every finished episode and sampled token is on disk, and no process is left.
    """
    partial = run_dir / "out" / "trajectories.parquet.partial"
    with rollout_process(run_dir, "run.yaml", "--out", "out") as process:
        wait_until(
            lambda: process.poll() is not None or (partial.exists() and len(read_results(partial)) > 3),
            "no result",
            timeout_s=300,
        )
        assert process.poll() is None, (run_dir / "log").read_text()
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=300)

    assert code == 130, (run_dir / "log").read_text()
    assert len(started) > 4, "there were no actors"
    wait_until(lambda: not any(each.is_running() for each in started), f"still running: {started}")
    before = {result.uid: result for result in read_results(run_dir / "out")}
    finished = {uid: result for uid, result in before.items() if result.status is not Status.ABORTED}
    unfinished = {each.uid: each for each in load_unfinished(run_dir / "out" / "unfinished.jsonl")}
    assert len(finished) > 3
    assert unfinished.keys() == before.keys() - finished.keys()
    assert any(each.trajectories or each.turns for each in unfinished.values())

    # In a process: this one is connected to a cluster that does not know the plugin of the run.
    with rollout_process(run_dir, "--resume", "out") as process:
        assert process.wait(timeout=300) == 0, (run_dir / "log").read_text()
    results = {result.uid: result for result in read_results(run_dir / "out")}
    assert len(results) == 40
    for uid, result in results.items():
        check_trajectory(result.trajectories[0])
        assert result.status in FINISHED
        had = before[uid].trajectories[0].input_ids.tolist() if uid in before else []
        assert result.trajectories[0].input_ids[: len(had)].tolist() == had
        if uid in finished:
            assert had == result.trajectories[0].input_ids.tolist()


def test_a_small_soak(tmp_path):
    """
    300 episodes with hanging, raising and blocking tools and killed actors: each is correct and delivered once.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--episodes", "300", "--round", "100"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "requested 300, missing 0, duplicated 0, wrong 0" in done.stdout
    assert "killed {" in done.stdout
