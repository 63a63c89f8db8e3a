"""The user's own code of each kind of part, which raises at its start: everywhere, or only in an actor of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

CODE: Final = '''
from pathlib import Path

from turnwise import Observer, State
from turnwise.errors import ConfigError, DataError
from turnwise_middleware import Middleware
from turnwise_rollout_buffer import GroupReward as _GroupReward, GroupRewardConfig
from turnwise_routers import RoundRobin
from turnwise_testing.probes.agent import ProbeParser
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine

HERE = Path(__file__).parent


def actor():
    """Return the name of the actor of this process; empty in the driver."""
    import ray

    return (ray.is_initialized() and ray.get_runtime_context().get_actor_name()) or ""


class Picky:
    """Notes each attempt, and raises."""

    def __init__(self):
        if EVERYWHERE or actor():
            with (HERE / "attempts").open("a") as file:
                file.write(f"{actor() or 'driver'}\\n")
            raise RAISED


class Engine(ScriptedEngine):
    def __init__(self):
        Picky()
        super().__init__(policy=RandomPolicy(seed=3, vocab_size=120, end_token_id=258, mean_tokens=4), record=False)


class Agent(Picky):
    async def step(self, episode):
        return State.TERMINATED


class Server:
    async def open(self):
        Picky()
        return {}

    async def close(self):
        pass

    async def step(self, episode):
        return State.TERMINATED


class Parser(ProbeParser):
    def __init__(self, resources):
        Picky()
        super().__init__(resources.chat)


class Reasoning(Picky):
    def split(self, text):
        return "", text


class Reward(Picky):
    def score(self, episode):
        return 0.0


class GroupReward(_GroupReward):
    def __init__(self):
        Picky()
        super().__init__(GroupRewardConfig())

    def score_group(self, episodes):
        return [0.0] * len(episodes)


class User(Picky):
    async def create(self, task):
        return self

    async def respond(self, session, messages):
        raise AssertionError

    async def release(self, session):
        pass


class Tool(Picky):
    schema = {"type": "function", "function": {"name": "own", "description": "x", "parameters": {"type": "object"}}}

    async def create(self, task):
        return None

    async def execute(self, session, arguments):
        raise AssertionError

    async def release(self, session):
        return None


class Postprocessor(Picky):
    def process(self, batch):
        return {}


class Watcher(Observer):
    place = "worker"

    def __init__(self):
        Picky()


class DriverWatcher(Observer):
    def __init__(self):
        Picky()


class Router(RoundRobin):
    def __init__(self):
        Picky()
        super().__init__()


class Middle(Picky, Middleware):
    async def before_step(self, episode):
        return None


class Room(Picky):
    def reset(self, task, seed):
        raise AssertionError

    def step(self, action):
        raise AssertionError

    def close(self):
        pass
'''

PARTS: Final[Mapping[str, tuple[list[str], str, str]]] = {
    "engine": (["engine=./own.py:Engine"], "engine: FILE:Engine", "replica 0"),
    "judge": (["judge={engine: './own.py:Engine'}"], "judge.engine: FILE:Engine", "judge replica 0"),
    "agent": (["agent=./own.py:Agent"], "agent: FILE:Agent", "worker 0"),
    "second agent": (["agents={other: './own.py:Agent'}"], "agents.other: FILE:Agent", "worker 0"),
    "parser": (["parser=./own.py:Parser"], "parser: FILE:Parser", "worker 0"),
    "reasoning parser": (["reasoning_parser=./own.py:Reasoning"], "reasoning_parser: FILE:Reasoning", "worker 0"),
    "reward": (["reward=./own.py:Reward"], "reward: FILE:Reward", "worker 0"),
    "reward in its worker": (
        ["reward=./own.py:Reward", "runtime.reward_workers=1"],
        "reward: FILE:Reward",
        "reward worker 0",
    ),
    "group reward": (
        ["group_reward=./own.py:GroupReward", "runtime.reward_workers=1"],
        "group_reward: FILE:GroupReward",
        "reward worker 0",
    ),
    "interaction": (["interaction=./own.py:User"], "interaction: FILE:User", "worker 0"),
    "tool": (["tools=[./own.py:Tool]"], "tool 'FILE:Tool'", "worker 0"),
    "postprocessor": (["postprocessors=[./own.py:Postprocessor]"], "postprocessors.0: FILE:Postprocessor", ""),
    "observer": (["observers=[./own.py:Watcher]"], "observers.0: FILE:Watcher", "worker 0"),
    "observer of the driver": (["observers=[./own.py:DriverWatcher]"], "observers.0: FILE:DriverWatcher", "worker 0"),
    "router": (["router=./own.py:Router"], "router: FILE:Router", "worker 0"),
    "middleware": (["middleware=[./own.py:Middle]"], "middleware.0: FILE:Middle", "worker 0"),
    "environment": (
        ["agent={name: environment, environment: './own.py:Room'}"],
        "environment 'FILE:Room'",
        "worker 0",
    ),
}
"""For each kind of part the overrides, how a line names the part, and the actor that builds it first; empty for none.

`FILE` is the path of `own.py`.
"""


def write_parts(folder: Path, error: str, *, everywhere: bool = False) -> None:
    """Write `own.py`, whose parts raise an error in actors, or everywhere."""
    text = f"{CODE}\n\nEVERYWHERE = {everywhere}\nRAISED = {error}\n"
    (folder / "own.py").write_text(text, encoding="utf-8")


def attempts(folder: Path) -> list[str]:
    """Return the process of each attempt to build a part."""
    return (folder / "attempts").read_text(encoding="utf-8").splitlines()
