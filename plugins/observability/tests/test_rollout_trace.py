"""`turnwise rollout --trace FILE` draws a run, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from turnwise import Status
from turnwise.cli import main
from turnwise_result_files import read_results
from turnwise_testing.installation import install_plugin
from turnwise_testing.tokenizers import byte_tokenizer

PLUGIN = """
import turnwise
from attrs import frozen


@frozen
class Config:
    token_latency_s: float = 0.0


def make(config, resources):
    from turnwise_testing.scripted import RandomPolicy, ScriptedEngine

    policy = RandomPolicy(seed=3, vocab_size=120, end_token_id=258, mean_tokens=9)
    return ScriptedEngine(policy=policy, token_latency_s=config.token_latency_s)


class Agent:
    def __init__(self, config, resources):
        self.chat = resources.chat

    async def step(self, episode):
        if episode.state == "pending":
            episode.begin(self.chat.prompt(episode.messages))
            return "generating"
        await episode.generate(max_tokens=50)
        return "terminated"


@turnwise.hookimpl
def register_engines(registry):
    registry.add("scripted", make, config=Config)


@turnwise.hookimpl
def register_agents(registry):
    registry.add("once", Agent)
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with an installed plugin: an engine and an agent that need no model."""
    folder = tmp_path / "site"
    install_plugin(folder, "traced_kit", PLUGIN)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "traced_kit", raising=False)
    return folder


@pytest.fixture
def run_dir(tmp_path, site):
    """A folder with a tokenizer, a data set of five rows and a config."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(5)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "engine": "scripted",
        "agent": "once",
        "rollout": {"n": 2, "prompt_length": 64, "response_length": 64},
        "plugins": ["observability", "traced_kit"],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
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


def test_a_config_that_leaves_the_plugin_out(run_dir, capsys):
    """The error says that the plugin is installed but not loaded."""
    config = run_dir / "run.yaml"
    config.write_text(config.read_text().replace("- observability\n", ""))
    assert main(["rollout", str(config), "--out", str(run_dir / "out"), "--trace", "run.json"]) == 2

    assert "installed but not loaded: " in (error := capsys.readouterr().err)
    assert "observability" in error


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_trace_of_a_run_that_was_stopped(run_dir, site, stop):
    """The trace is valid however the run ends; after an interrupt it has the aborted episodes."""
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", "engine.token_latency_s=0.05"]
    command += ["--out", "out", "--trace", "run.json"]
    log = run_dir / "log"
    with log.open("w") as stream:
        environment = os.environ | {"PYTHONPATH": str(site)}
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
