"""The log as a user has it: standard error of `turnwise rollout`, read by a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_site import make_site, start

from turnwise_testing.whole_runs.scripted_run import PLUGIN, environment_of, write_scripted_run

CODE = """
import os
import sys
import warnings

import structlog

from turnwise import State, ToolCall


def look_up(key: str) -> str:
    structlog.get_logger().info("looked up")
    return key


class Asks:
    def __init__(self, resources):
        self.chat = resources.chat

    async def step(self, episode):
        episode.begin(self.chat.prompt(episode.messages))
        await episode.generate(max_tokens=4)
        await episode.call_tool(ToolCall(name="look_up", arguments={"key": "a"}))
        return State.TERMINATED


def one(episode):
    structlog.get_logger().info("scored")
    print("a print of a reward")
    sys.stderr.write("a library's line\\nand another")
    warnings.warn("a warning of a reward", stacklevel=1)
    os.write(2, b"C++ writes\\n")
    return 1.0
"""
NUM_EPISODES = 6
REWARDS = {0: "WorkerActor", 1: "RewardActor"}
"""The actor that scores, by `runtime.reward_workers`."""


def run(folder: Path, *changes: str) -> list[str]:
    """Run `turnwise rollout` in another process, and return the lines of its standard error."""
    config = write_scripted_run(
        folder,
        num_tasks=NUM_EPISODES // 2,
        plugins=[PLUGIN, "plain_functions", "observability"],
        modules=["./parts.py"],
        agent="./parts.py:Asks",
        tools=["./parts.py:look_up"],
        reward="./parts.py:one",
        observers=["episode_log", "routing_log"],
        telemetry={"log_level": "debug", "log_format": "json"},
    )
    (folder / "parts.py").write_text(CODE, encoding="utf-8")
    command = [sys.executable, "-m", "turnwise.cli", "rollout", str(config), "--out", str(folder / "out"), *changes]
    done = subprocess.run(command, env=environment_of(folder), capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    return done.stderr.splitlines()


def parse(lines: list[str]) -> list[dict[str, Any]]:
    """Check that each line is one JSON object with the keys of a log line; return the objects."""
    entries = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert entries
    assert all({"event", "level", "timestamp"} <= entry.keys() for entry in entries)
    return entries


def check(lines: list[str]) -> list[dict[str, Any]]:
    """Check the lines of the scripted run; return their objects."""
    entries = parse(lines)
    finished = {entry["key"] for entry in entries if entry["event"] == "episode finished"}
    for event in ("looked up", "scored"):
        assert finished == {entry["key"] for entry in entries if entry["event"] == event}
    assert NUM_EPISODES == len(finished)
    return entries


@pytest.mark.slow
def test_each_line_is_json(tmp_path: Path) -> None:
    """In one process, standard error has only objects, each on one line, and the lines of an episode share a key."""
    entries = check(run(tmp_path))
    told = {str(entry["event"]).strip() for entry in entries}
    assert {"a library's line", "C++ writes"} <= told
    assert any("a warning of a reward" in each for each in told)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("reward_workers", REWARDS)
def test_each_line_of_an_actor_is_json(tmp_path: Path, reward_workers: int) -> None:
    """On Ray, log lines of workers, replicas and reward workers are objects too, and name their process."""
    workers = ["runtime.num_workers=2", "runtime.num_replicas=2", f"runtime.reward_workers={reward_workers}"]
    entries = check(run(tmp_path, "runtime=ray", *workers))

    scored = [entry for entry in entries if entry["event"] == "scored"]
    assert {REWARDS[reward_workers]} == {entry["actor"] for entry in scored}
    assert all(isinstance(entry["pid"], int) for entry in scored)
    printed = [entry for entry in entries if entry["event"] == "a print of a reward"]
    assert {("stdout", REWARDS[reward_workers])} == {(entry["stream"], entry["actor"]) for entry in printed}
    routed = [entry for entry in entries if entry["event"] == "request routed"]
    assert NUM_EPISODES == len({entry["key"] for entry in routed})


ON_RAY = ("runtime=ray", "telemetry={log_level: debug, log_format: json}")
GATEWAY = Path(__file__).parents[1] / "examples" / "external_openai"


@pytest.mark.ray
@pytest.mark.slow
def test_each_line_of_a_training_is_json(tmp_path: Path) -> None:
    """Of trainer, replicas and workers on Ray, with the lines of weight updates."""
    site = make_site(tmp_path)
    options = ("--out", str(site / "out"), "train.num_steps=1", "observers=[episode_log]")
    process = start(site, "train", str(site / "config.yaml"), *options, *ON_RAY)
    _out, err = process.communicate(timeout=600)

    assert 0 == process.returncode, err
    events = [entry["event"] for entry in parse(err.splitlines())]
    assert {"step", "weights updated", "episode finished"} <= set(events)


@pytest.mark.ray
@pytest.mark.slow
def test_each_line_of_a_gateway_is_json(tmp_path: Path) -> None:
    """Of an outside program's episodes in workers on Ray, with the gateway's own lines."""
    program = f"agent.command=[{sys.executable}, '{GATEWAY / 'agent.py'}']"
    options = ("--out", str(tmp_path / "out"), "data.limit=1", "rollout.n=1", program)
    process = start(tmp_path, "rollout", str(GATEWAY / "rollout.yaml"), *options, *ON_RAY)
    _out, err = process.communicate(timeout=600)

    assert 0 == process.returncode, err
    assert "rollout ended" in [entry["event"] for entry in parse(err.splitlines())]
