"""`turnwise rollout --trace FILE` draws a run, however it ends."""

import json
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
import yaml

from turnwise import Status
from turnwise.cli import main
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, environment_of, write_scripted_run


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A folder with a config, and an installed plugin that needs no model."""
    write_scripted_run(tmp_path, plugins=["observability", PLUGIN])
    monkeypatch.syspath_prepend(str(tmp_path / SITE))
    return tmp_path


def drawn_episodes(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"] for event in events if event.get("cat") == "episode"]


def test_every_episode_is_drawn(run_dir):
    """The option adds the observer to this run only: the config in the output folder does not name it."""
    path, out = run_dir / "traces" / "run.json", run_dir / "out"
    assert main(["rollout", str(run_dir / "run.yaml"), "--out", str(out), "--trace", str(path)]) == 0

    assert {each["uid"] for each in drawn_episodes(path)} == {result.uid for result in read_results(out)}
    assert yaml.safe_load((out / "config.resolved.yaml").read_text())["observers"] == []


def test_each_slice_names_its_attempt(run_dir):
    """Every slice of an episode has the key that the file of episodes has, so that both can be joined."""
    path, out = run_dir / "run.json", run_dir / "out"
    assert main(["rollout", str(run_dir / "run.yaml"), "--out", str(out), "--trace", str(path)]) == 0

    slices = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]

    rows = pq.read_table(out / "trajectories.parquet", columns=["key"])["key"].to_pylist()
    assert {each["cat"] for each in slices} >= {"episode", "turn", "generate", "reward"}
    assert {each["args"]["key"] for each in slices if each["cat"] != "memory"} == {*rows}


def test_a_config_that_leaves_the_plugin_out(run_dir, capsys):
    """The error says that the plugin is installed but not loaded."""
    config = run_dir / "run.yaml"
    config.write_text(config.read_text().replace("- observability\n", ""))
    assert main(["rollout", str(config), "--out", str(run_dir / "out"), "--trace", "run.json"]) == 2

    assert "installed but not loaded: " in (error := capsys.readouterr().err)
    assert "observability" in error


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_trace_of_a_run_that_was_stopped(run_dir, stop):
    """The trace is valid however the run ends; after an interrupt it has the aborted episodes."""
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", "engine.token_latency_s=0.05"]
    command += ["--out", "out", "--trace", "run.json"]
    log = run_dir / "log"
    with log.open("w") as stream:
        environment = environment_of(run_dir)
        process = subprocess.Popen(command, cwd=run_dir, env=environment, stdout=stream, stderr=stream)
        try:
            wait_for(lambda: "rollout started" in log.read_text(), process)
            process.send_signal(stop)
            process.wait(timeout=600)
        finally:
            process.kill()
            process.wait()

    statuses = [each["status"] for each in drawn_episodes(run_dir / "run.json")]
    assert Status.ABORTED in statuses or stop is signal.SIGKILL


def wait_for(condition, process, timeout_s=600):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the process ended early"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
