"""A blueprint whose engine ends a turn when the agent, in another process, has heard a part of it."""

import asyncio
from pathlib import Path

import numpy as np
from attrs import evolve, frozen
from ray_blueprint import POLICY, ScriptedBlueprint, touch

from turnwise import State
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.runtime.worker import WorkerComponents
from turnwise_testing.engines.scripted import ScriptedEngine


class StreamEngine(ScriptedEngine):
    """Lets a listener hear the first ids, and waits for a file of the agent's."""

    folder: str = ""

    async def generate(self, request):
        result = await super().generate(evolve(request, on_tokens=None))
        request.on_tokens(result.token_ids[:1].tolist())
        while not has_file(self.folder, request.trajectory_id):  # noqa: ASYNC110 - another process creates the file
            await asyncio.sleep(0.01)
        return result


def has_file(folder, name):
    """Return whether a folder has a file."""
    return Path(folder, name).exists()


@frozen
class Listener:
    """Samples one turn, and lets it end when it has heard the first ids."""

    folder: str

    async def step(self, episode):
        episode.begin(np.frombuffer(episode.task.uid.encode(), "uint8"))
        heard = []

        def listen(token_ids):
            heard.extend(token_ids)
            touch(Path(self.folder, episode.key))

        result = await episode.sample(max_tokens=20, on_tokens=listen)
        episode.append(result)
        episode.record_metric("heard_first", float(heard == result.token_ids[: len(heard)].tolist() and bool(heard)))
        return State.TERMINATED


class StreamBlueprint(ScriptedBlueprint):
    """Workers whose only agent is a `Listener`."""

    def make_engine(self):
        engine = StreamEngine(policy=POLICY, record=False)
        engine.folder = self.folder
        return engine

    def make_components(self, engine, judge=None):
        limits = Limits(prompt_length=100, response_length=100)
        programs = {"listener": EpisodeProgram(agent=Listener(self.folder))}
        return WorkerComponents(engine=engine, programs=programs, limits=limits, default_agent="listener")
