"""A plugin with scripted parts for the tests of the command line, and real processes that run it."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager

from turnwise.cli import main
from turnwise.errors import DataError
from turnwise_result_files import read_results

NUM_HELD = 3
"""Episodes of a run of ten that wait until the file of `engine.hold` exists."""
PLUGIN = """
import os

import turnwise
from attrs import frozen


@frozen
class Config:
    token_latency_s: float = 0.0
    num_failures: int = 0
    breaks: bool = False
    hold: str = ""


def make(config, resources):
    from turnwise_testing.scripted import Failure, RandomPolicy, ScriptedEngine

    def latency(request, index):
        # Episodes of the last two rows stop after two tokens until the file exists.
        prompt = "".join(map(chr, request.token_ids[:60].tolist()))
        held = "Question 3" in prompt or "Question 4" in prompt
        return 1000.0 if held and index == 2 and not os.path.exists(config.hold) else 0.001

    policy = RandomPolicy(seed=3, vocab_size=120, end_token_id=258, mean_tokens=9)
    failures = dict.fromkeys(range(config.num_failures), Failure.ERROR)
    engine = ScriptedEngine(
        policy=policy, token_latency_s=latency if config.hold else config.token_latency_s, failures=failures
    )
    if config.breaks:
        engine._state = "broken"
    return engine


class Agent:
    def __init__(self, config, resources):
        self.chat = resources.chat

    async def step(self, episode):
        if episode.state == "pending":
            episode.begin(self.chat.prompt(episode.messages))
            return "generating"
        await episode.generate(max_tokens=50)
        return "terminated"


class Length:
    def score(self, episode):
        return float(episode.trajectory.num_response_tokens)


class Odd:
    def score(self, episode):
        circle = []
        circle.append(circle)
        deep = []
        for _ in range(3000):
            deep = [deep]
        odd = {(1, 2): 3, "circle": circle, "deep": deep, "huge": 10**6000, "object": object(), "nan": float("nan")}
        return turnwise.TrajectoryScore(value=1.0, extra=odd if episode.task.sample_index == 1 else {})


@turnwise.hookimpl
def register_engines(registry):
    registry.add("scripted", make, config=Config)


@turnwise.hookimpl
def register_agents(registry):
    registry.add("once", Agent)


@turnwise.hookimpl
def register_rewards(registry):
    registry.add("length", lambda config, resources: Length())
    registry.add("odd", lambda config, resources: Odd())
"""


def rollout(run_dir, *arguments):
    return main(["rollout", str(run_dir / "run.yaml"), *arguments, "--out", str(run_dir / "out")])


@contextmanager
def started(run_dir, site, *arguments, until=10 - NUM_HELD, out="out"):
    """Run ten episodes in another process, of which three wait; enter once the others can be read."""
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", f"engine.hold={run_dir / 'released'}"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    with (run_dir / "log").open("w") as log:
        command += [*arguments, "--out", out]
        process = subprocess.Popen(command, cwd=run_dir, env=environment, stdout=log, stderr=log)
        try:
            wait_for(lambda: num_readable(run_dir / out) >= until, process)
            yield process
        finally:
            process.kill()
            process.wait()


def num_readable(out):
    """Return the number of episodes that a folder's partial file has."""
    try:
        return len(read_results(out / "trajectories.parquet.partial"))
    except DataError:
        return 0


def wait_for(condition, process, timeout_s=600):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the process ended early"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
