"""Faults that span a cluster: a node that goes, a driver that is interrupted, stragglers, and a soak of all of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from ray_blueprint import ScriptedBlueprint

from turnwise import Status, Task
from turnwise.cli import main
from turnwise.config_runtime import RayConfig, RuntimeConfig
from turnwise.invariants import check_trajectory
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray_runtime import RayRuntime
from turnwise.storage import read_results
from turnwise.testing.tokenizers import byte_tokenizer
from turnwise.unfinished_file import load_unfinished, save_unfinished

ROOT = Path(__file__).parents[1]
ENDED = {Status.COMPLETED, Status.TRUNCATED}

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def two_nodes():
    """
    Two Ray nodes on this machine, each with room for two replicas; yields the cluster and the node that may go.

    That node has no CPUs: what needs some is on the other.
    """
    import ray
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # what the nodes' processes import the blueprint from
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"seat": 2}})
    second = cluster.add_node(num_cpus=0, resources={"seat": 2})
    ray.init(address=cluster.address, namespace="turnwise")
    try:
        yield cluster, second
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def manager(blueprint=None, **ray_options):
    ray_options = {"backoff_s": 0.05, "heartbeat_s": 0.2, "heartbeat_timeout_s": 2.0} | ray_options
    config = RuntimeConfig(name="ray", num_workers=2, num_replicas=4, ray=RayConfig(**ray_options))
    plan = RolloutPlan(default_agent="four", agent_names=frozenset({"four"}))
    return RolloutManager(RayRuntime(blueprint or ScriptedBlueprint(), config), plan)


def tasks(*uids):
    message = {"role": "user", "content": "x"}
    return [Task(messages=(message,), uid=uid, sample_index=i) for i, uid in enumerate(uids)]


def numbered(count):
    return tasks(*(f"task{i}" for i in range(count)))


def ids(results):
    return {result.uid: result.trajectories[0].input_ids.tolist() for result in results}


def assert_whole(results, expected):
    """Every task is there exactly once, and its record holds and is complete."""
    assert Counter(r.task.uid for r in results) == Counter(t.uid for t in expected)
    for result in results:
        assert result.status in ENDED, result.fault
        check_trajectory(result.trajectories[0])
        assert len(result.trajectories[0].turns()) == 4


def test_a_node_of_replicas_dies(two_nodes):
    """
    With a node go its two replicas, in mid-generation: all episodes end on the others as if nothing had been.
    """
    cluster, second = two_nodes
    seat = {"replica_resources": {"resources": {"seat": 1}}, "start_timeout_s": 120.0}
    seat |= {"worker_cpus": 0.1, "window": 4}  # no worker goes too, and most episodes begin after the first has ended
    with manager(ScriptedBlueprint(token_latency_s=0.01), **seat) as running:
        undisturbed = ids(running.rollout(numbered(60)))
        stream = running.iterate(numbered(60))
        results = [next(stream)]
        cluster.remove_node(second, allow_graceful=False)
        results += list(stream)
        stats = running.stats()

    assert_whole(results, numbered(60))
    assert ids(results) == undisturbed
    assert stats["moves"] > 0, "no episode was on the node that went"
    assert stats["failed"] == 0


def test_stragglers_and_tools_that_hang(two_nodes, tmp_path):
    """
    A call ends without those whose tool hangs; they travel to the driver with what they had, and finish later.
    """
    rows = tasks(*(f"task{i}" for i in range(18)), "tool-hangs0", "tool-hangs1")
    with manager(ScriptedBlueprint(tool_call_s=60.0)) as running:
        first = running.rollout(rows, min_fraction=0.9)
        left = running.unfinished
        save_unfinished(tmp_path / "unfinished.jsonl", left)

    assert_whole(first, rows[:18])
    assert {u.spec.task.uid for u in left} == {"tool-hangs0", "tool-hangs1"}
    assert all(u.num_kept_tokens > 0 for u in left)
    with manager(ScriptedBlueprint(tool_call_s=1.0)) as running:  # other processes, where hanging has an end
        later = running.rollout([], resume=load_unfinished(tmp_path / "unfinished.jsonl"))

    assert_whole(later, rows[18:])
    for before, after in zip(left, later, strict=True):
        kept = before.trajectories[0].input_ids.tolist()
        assert after.trajectories[0].input_ids[: len(kept)].tolist() == kept
        assert after.metrics.num_tool_errors == 3


# A driver that is interrupted

PLUGIN = """
import turnwise
from attrs import frozen


@frozen
class Config:
    token_latency_s: float = 0.0


def make(config, resources):
    from turnwise.testing.scripted import RandomPolicy, ScriptedEngine

    policy = RandomPolicy(seed=3, vocab_size=120, end_token_id=258, mean_tokens=20)
    return ScriptedEngine(policy=policy, token_latency_s=config.token_latency_s)


class Agent:
    def __init__(self, config, resources):
        self.chat = resources.chat

    async def step(self, episode):
        if episode.state == "pending":
            episode.begin(self.chat.prompt(episode.messages))
            return "generating"
        await episode.generate(max_tokens=40)
        return "terminated" if len(episode.trajectory.turns()) >= 1 else "generating"


@turnwise.hookimpl
def register_engines(registry):
    registry.add("scripted", make, config=Config)


@turnwise.hookimpl
def register_agents(registry):
    registry.add("once", Agent)
"""


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A folder with a plugin, a tokenizer, 40 rows and a config for the runtime `ray`."""
    site = tmp_path / "site"
    info = site / "acme_faults-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "acme_faults.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turnwise]\nacme_faults = acme_faults\n")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "engine": {"name": "scripted", "token_latency_s": 0.15},
        "agent": "once",
        "rollout": {"prompt_length": 64, "response_length": 64, "max_in_flight": 16},
        "runtime": {"name": "ray", "num_workers": 2, "num_replicas": 2},
        "plugins": ["acme_faults"],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    return tmp_path


@contextmanager
def rollout_process(folder, *arguments):
    """`turnwise rollout` in a process of its own, which is gone afterwards with all that it started."""
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


def num_results(path):
    return len(read_results(path)) if path.exists() else 0


def wait_for(condition, what, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_an_interrupted_driver_keeps_everything(run_dir):
    """
    Ctrl-C under Ray: exit code 130, all that finished and all that was sampled is on disk, and no process is left.
    """
    partial = run_dir / "out" / "trajectories.parquet.partial"
    with rollout_process(run_dir, "run.yaml", "--out", "out") as process:
        wait_for(
            lambda: process.poll() is not None or (partial.exists() and len(read_results(partial)) > 3), "no result"
        )
        assert process.poll() is None, (run_dir / "log").read_text()
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)

    assert code == 130, (run_dir / "log").read_text()
    assert len(started) > 4, "there were no actors"
    wait_for(lambda: not [each for each in started if each.is_running()], f"still there: {started}", 30)
    before = {r.uid: r for r in read_results(run_dir / "out")}
    finished = {uid: r for uid, r in before.items() if r.status is not Status.ABORTED}
    unfinished = {u.uid: u for u in load_unfinished(run_dir / "out" / "unfinished.jsonl")}
    assert len(finished) > 3
    assert unfinished.keys() == before.keys() - finished.keys()
    assert any(u.num_kept_tokens for u in unfinished.values())

    assert main(["rollout", "--resume", str(run_dir / "out")]) == 0
    results = {r.uid: r for r in read_results(run_dir / "out")}
    assert len(results) == 40
    for uid, result in results.items():
        check_trajectory(result.trajectories[0])
        assert result.status in ENDED
        had = before[uid].trajectories[0].input_ids.tolist() if uid in before else []
        assert result.trajectories[0].input_ids[: len(had)].tolist() == had
        if uid in finished:
            assert had == result.trajectories[0].input_ids.tolist()


def test_a_small_soak(tmp_path):
    """
    300 episodes among tools that hang, raise and block and actors that are killed: each is right, and there once.
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
    assert "asked for 300, missing 0, doubled 0, wrong 0" in done.stdout
    assert "killed {" in done.stdout
