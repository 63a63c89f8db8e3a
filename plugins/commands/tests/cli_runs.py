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
ODD_PARTS = """
import asyncio
import os
import signal

import attrs
import turnwise
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine


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
def register_rewards(registry):
    registry.add("odd", lambda config, resources: Odd())


class Interrupts:
    async def step(self, episode):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()


@turnwise.hookimpl
def register_agents(registry):
    registry.add("interrupts", lambda config, resources: Interrupts())


@attrs.frozen
class HangsConfig:
    at: str = "start"


class Hangs(ScriptedEngine):
    at = ""

    async def start(self):
        await self.hang("start")
        await super().start()

    async def stop(self):
        await self.hang("stop")
        await super().stop()

    async def hang(self, place):
        if place == self.at:
            open("hangs", "w").close()
            await asyncio.Event().wait()


@turnwise.hookimpl
def register_engines(registry):
    def make(config, resources):
        engine = Hangs(policy=RandomPolicy(seed=3, vocab_size=120, end_token_id=258, mean_tokens=9))
        engine.at = config.at
        return engine

    registry.add("hangs", make, config=HangsConfig)
"""


def rollout(run_dir, *arguments):
    return main(["rollout", str(run_dir / "run.yaml"), *arguments, "--out", str(run_dir / "out")])


def environment_of(site):
    """Return the environment of a process that finds the modules of a folder, and those of this process."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


@contextmanager
def started(run_dir, site, *arguments, until=10 - NUM_HELD, out="out", stderr=None):
    """Run ten episodes in another process, of which three wait; enter once the others can be read."""
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", f"engine.hold={run_dir / 'released'}"]
    environment = environment_of(site)
    with (run_dir / "log").open("w") as log:
        command += [*arguments, "--out", out]
        process = subprocess.Popen(command, cwd=run_dir, env=environment, stdout=log, stderr=stderr or log)
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
