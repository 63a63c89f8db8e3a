"""Blueprints of judges, rewards and placed engines for the tests on Ray; every actor imports them."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from attrs import evolve, field, frozen
from ray_blueprint import END, HeldEngine, ScriptedBlueprint

from turnwise import SamplingParams, TrajectoryScore
from turnwise.errors import InfrastructureError
from turnwise.runtime.judge import JudgeClient
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine
from turnwise_testing.probes.agent import probe_chat


def once(folder, name):
    """Return True for the first process that asks for this name."""
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def judge_client(pool):
    """Return a judge over a pool of replicas."""
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(END,))
    release = getattr(pool, "release", lambda _key: None)
    return JudgeClient(engine=pool, chat=probe_chat(), sampling=sampling, release=release)


class JudgedReward:
    """Scores by the judge's reply to the sampled ids; the uid of a task may ask for a fault."""

    def __init__(self, judge, folder):
        self.judge = judge
        self.folder = folder

    async def score(self, episode):
        uid = episode.task.uid
        if uid.startswith("always-kills"):
            os._exit(1)
        if uid.startswith("kills-once") and once(self.folder, uid):
            os._exit(1)
        if uid.startswith("fails-once") and once(self.folder, uid):
            raise InfrastructureError("the service is down")
        if uid.startswith("raises"):
            raise KeyError("ground_truth")
        if uid.startswith("cancels"):
            raise asyncio.CancelledError
        if self.judge is None:
            return float(episode.trajectory.input_ids.sum() % 97)
        reply = await self.judge.generate(episode.trajectory.input_ids)
        said = await self.judge.ask([{"role": "user", "content": uid}])
        episode.record_metric("judge_tokens", float(len(reply.token_ids)))
        return TrajectoryScore(value=float(reply.token_ids.sum() % 97), extra={"said": float(len(said))})


class BlockingReward:
    """Sums the ids, and blocks its thread if the task asks for it."""

    def score(self, episode):
        if episode.task.uid.startswith("blocks"):
            time.sleep(1000)
        return float(episode.trajectory.input_ids.sum() % 97)


@frozen
class JudgedBlueprint(ScriptedBlueprint):
    """
    Scripted engines, a scripted judge, and a reward that asks it.

    Attributes:
        judge_folder: as `folder` of `HeldEngine`, for the judge.
    """

    folder: str = ""
    blocking: bool = False
    judged: bool = True
    reward_s: float = 600.0
    judge_latency_s: float = 0.001
    judge_folder: str = ""

    def make_judge_engine(self):
        policy = RandomPolicy(seed=5, vocab_size=120, end_token_id=END, mean_tokens=12)
        engine = HeldEngine(policy=policy, token_latency_s=self.judge_latency_s, record=False)
        engine.folder = self.judge_folder
        return engine

    def make_reward(self, judge=None):
        if self.blocking:
            return BlockingReward()
        client = None if judge is None else judge_client(judge)
        return JudgedReward(client if self.judged else None, self.folder)

    def make_components(self, engine, judge=None):
        parts = super().make_components(engine)
        programs = {name: evolve(program, reward=self.make_reward(judge)) for name, program in parts.programs.items()}
        return evolve(parts, programs=programs, limits=evolve(parts.limits, reward_s=self.reward_s))


def write(path, text):
    """Write a file."""
    path.write_text(text)


class TellingEngine(ScriptedEngine):
    """An engine that writes a note about its place when it starts."""

    folder: str = ""

    async def start(self):
        import ray

        note = {
            "python": sys.executable,
            "prefix": sys.prefix,
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "node": ray.get_runtime_context().get_node_id(),
        }
        write(Path(self.folder, f"{os.getpid()}.json"), json.dumps(note))
        await super().start()


class PortEngine(ScriptedEngine):
    """An engine that needs a port, which may be taken."""

    port: int = 0

    async def start(self):
        import socket

        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", self.port))
        await super().start()


@frozen
class TellingBlueprint(ScriptedBlueprint):
    """Engines that write notes about their places, or that need a port."""

    folder: str = ""
    port: int = 0
    policy: RandomPolicy = field(factory=lambda: RandomPolicy(seed=1, vocab_size=250, end_token_id=END, mean_tokens=12))

    def make_engine(self):
        kind = PortEngine if self.port else TellingEngine
        engine = kind(policy=self.policy, token_latency_s=self.token_latency_s, record=False)
        if self.port:
            engine.port = self.port
        else:
            engine.folder = self.folder
        return engine
