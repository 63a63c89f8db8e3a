"""
A worker: drives many episodes at once on one event loop.

It knows neither where its episodes come from nor where results go; a runtime gives it both. Finished or not, every
spec it takes is delivered exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping

from attrs import define, evolve, field, frozen

from turnwise.driver import Recipe, run_episode
from turnwise.episode import LiveEpisode
from turnwise.episode_setup import EngineClient, Limits, Services
from turnwise.episode_spec import EpisodeSpec, UnfinishedEpisode
from turnwise.observer import LimitReached
from turnwise.protocols import Interaction
from turnwise.result import EpisodeResult
from turnwise.telemetry import Observers
from turnwise.types import Fault, Status

Numbered = tuple[int, EpisodeSpec]
Deliver = Callable[[int, EpisodeResult], None]


@frozen(kw_only=True)
class WorkerParts:
    """
    What a worker is made of.

    Attributes:
        engine: where tokens come from.
        recipes: what drives an episode, by agent name.
        limits: of every episode.
        stop_token_ids: the chat template's end-of-turn ids, added to every request.
        interaction: the user simulator, if one is configured.
        observers: who hears the events.
        max_in_flight: most episodes at once.
        on_episode_end: called with the key of an episode whose contexts need not be kept any more.
    """

    engine: EngineClient
    recipes: Mapping[str, Recipe]
    limits: Limits
    stop_token_ids: tuple[int, ...] = ()
    interaction: Interaction | None = None
    observers: Observers = field(factory=Observers)
    max_in_flight: int = 256
    on_episode_end: Callable[[str], None] = field(default=lambda _key: None)


@define(eq=False)
class Worker:
    """Drives episodes; `abort` ends those that run and delivers the rest unstarted."""

    parts: WorkerParts
    name: str = "worker 0"
    _live: dict[LiveEpisode, int] = field(factory=dict, init=False)
    _aborting: bool = field(default=False, init=False)

    async def run(self, specs: Iterator[Numbered], deliver: Deliver) -> None:
        """
        Run specs until there are none left.

        Args:
            specs: numbered specs; several workers may take from one iterator.
            deliver: called on the event loop with the number and the result of each.
        """
        self.resume()
        async with asyncio.TaskGroup() as background, asyncio.TaskGroup() as slots:
            services = self.services(background)
            for _ in range(self.parts.max_in_flight):
                first = next(specs, None)
                if first is None:
                    break
                slots.create_task(self._slot(first, specs, deliver, services))

    def services(self, background: asyncio.TaskGroup) -> Services:
        """Return what episodes share, with a group for what they start beside themselves."""
        return Services(
            engine=self.parts.engine,
            spawn=background.create_task,
            interaction=self.parts.interaction,
            observers=self.parts.observers,
            worker=self.name,
        )

    def resume(self) -> None:
        """Take new episodes again after an abort."""
        self._aborting = False

    def abort(self) -> None:
        """End soon: running episodes return what they have."""
        self._aborting = True
        self.cut(frozenset(self._live.values()))

    def cut(self, numbers: Collection[int]) -> None:
        """End these episodes soon, if they run here."""
        for episode, number in tuple(self._live.items()):
            if number in numbers:
                episode.abort()

    async def _slot(self, first: Numbered, specs: Iterator[Numbered], deliver: Deliver, services: Services) -> None:
        """Run one episode after the other; as many slots as episodes may run at once."""
        taken: Numbered | None = first
        while taken is not None:
            number, spec = taken
            deliver(number, await self.run_one(spec, services, number))
            taken = next(specs, None)
            if taken is not None:
                self.tell_of_full_slots()

    def tell_of_full_slots(self) -> None:
        """Tell observers that an episode had to wait for another to end."""
        if self.parts.observers.heard("on_limit_reached"):
            event = LimitReached(limit="rollout.max_in_flight", where=self.name)
            self.parts.observers.emit("on_limit_reached", event)

    async def run_one(self, spec: EpisodeSpec, services: Services, number: int = 0) -> EpisodeResult:
        """Run one episode; while aborting, return it unstarted."""
        if self._aborting:
            return unstarted(spec)
        stops = (*spec.sampling.stop_token_ids, *self.parts.stop_token_ids)
        sampling = spec.sampling.with_(stop_token_ids=tuple(dict.fromkeys(stops)))
        episode = LiveEpisode(evolve(spec, sampling=sampling), self.parts.limits, services)
        self._live[episode] = number
        try:
            return await run_episode(episode, self.parts.recipes[spec.agent_name])
        finally:
            del self._live[episode]
            self.parts.on_episode_end(episode.key)


def unstarted(spec: EpisodeSpec) -> EpisodeResult:
    """Return the result of an episode that was aborted before its first step, or before it went on."""
    fault = Fault(owner="infra", kind="EpisodeAborted", message="the run was asked to stop before it began")
    kept = spec.unfinished or UnfinishedEpisode(spec=spec, began=False)
    return evolve(not_run(spec, Status.ABORTED, fault), unfinished=kept)


def not_run(spec: EpisodeSpec, status: Status, fault: Fault) -> EpisodeResult:
    """Return the result of an episode that nobody runs: all it has is what an earlier part of it kept."""
    kept = spec.unfinished
    records = [trajectory.rewound(trajectory.mark()) for trajectory in kept.trajectories] if kept else []
    for trajectory in records:
        trajectory.close()
    return EpisodeResult(
        task=spec.task,
        rollout_n=spec.rollout_n,
        global_step=spec.global_step,
        validation=spec.validation,
        agent_name=spec.agent_name,
        status=status,
        fault=fault,
        trajectories=tuple(records),
        messages=kept.messages if kept else tuple(spec.task.messages),
    )
