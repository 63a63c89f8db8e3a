"""The log as a user has it: standard error of `turnwise rollout`, read by a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise_testing.scripted_run import PLUGIN, environment_of, write_scripted_run

CODE = """
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


def check(lines: list[str], *, on_ray: bool) -> list[dict[str, object]]:
    """Check that each line of the log is one JSON object; return the objects."""
    entries = [json.loads(line) for line in lines if "timestamp" in line]
    rest = [line for line in lines if "timestamp" not in line]
    assert [] == [line for line in rest if "event" in line]
    assert on_ray or not rest  # Ray writes other lines too
    assert all({"event", "level", "timestamp"} <= entry.keys() for entry in entries)
    finished = {entry["key"] for entry in entries if entry["event"] == "episode finished"}
    for event in ("looked up", "scored"):
        assert finished == {entry["key"] for entry in entries if entry["event"] == event}
    assert NUM_EPISODES == len(finished)
    return entries


def test_each_line_is_json(tmp_path: Path) -> None:
    """In one process, standard error has only objects, each on one line, and the lines of an episode share a key."""
    check(run(tmp_path), on_ray=False)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("reward_workers", REWARDS)
def test_each_line_of_an_actor_is_json(tmp_path: Path, reward_workers: int) -> None:
    """On Ray, log lines of workers, replicas and reward workers are objects too, and name their process."""
    workers = ["runtime.num_workers=2", "runtime.num_replicas=2", f"runtime.reward_workers={reward_workers}"]
    entries = check(run(tmp_path, "runtime=ray", *workers), on_ray=True)

    scored = [entry for entry in entries if entry["event"] == "scored"]
    assert {REWARDS[reward_workers]} == {entry["actor"] for entry in scored}
    assert all(isinstance(entry["pid"], int) for entry in scored)
    routed = [entry for entry in entries if entry["event"] == "request routed"]
    assert NUM_EPISODES == len({entry["key"] for entry in routed})
