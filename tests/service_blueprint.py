"""A blueprint whose agent asks its service in the driver; every actor imports it."""

import asyncio

import numpy as np
from attrs import define, field
from ray_blueprint import ScriptedBlueprint

from turnwise import State
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.errors import ConfigError
from turnwise.runtime.worker import WorkerComponents


@define(eq=False)
class Register:
    """
    A service that notes who is there, and lets all that have entered wait until it is told to go on.

    Attributes:
        present: names of the episodes whose call has not ended.
        left: names of the episodes whose call was cancelled.
    """

    present: list = field(factory=list)
    left: list = field(factory=list)
    opened: list = field(factory=list)
    goes_on: asyncio.Event = field(factory=asyncio.Event)

    async def open(self, host):
        return {"register": f"none://{host}"}

    async def call(self, method, arguments):
        if method == "opened":
            self.opened.append(arguments["host"])
            return None
        if arguments["uid"].startswith("refused"):
            raise ConfigError("the register refuses it")
        self.present.append(arguments["uid"])
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            self.left.append(arguments["uid"])
            raise
        finally:
            self.present.remove(arguments["uid"])
        return [1, 2, len(arguments["uid"])]

    async def close(self):
        self.goes_on.set()


class Visitor:
    """An agent whose episode is a call of the service, and its result the prompt of a turn."""

    def make_service(self):
        return Register()

    def connect(self, service):
        self.service = service

    async def open(self):
        await self.service.call("opened", host=self.service.host)
        return {}

    async def close(self):
        """Close nothing."""

    async def step(self, episode):
        ids = await self.service.call("visit", uid=episode.task.uid)
        episode.begin(np.array(ids, "int32"))
        await episode.generate(max_tokens=5)
        return State.TERMINATED


class ServiceBlueprint(ScriptedBlueprint):
    """Workers whose only agent is a `Visitor`."""

    def make_components(self, engine, judge=None):
        limits = Limits(prompt_length=100, response_length=100)
        programs = {"visitor": EpisodeProgram(agent=Visitor())}
        return WorkerComponents(engine=engine, programs=programs, limits=limits, default_agent="visitor")
