"""
A worker: drives many episodes at once on one event loop.

A runtime gives it specs and a callback for results. Each spec that a worker takes has exactly one result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping

import structlog
from attrs import define, evolve, field, frozen
from structlog.contextvars import bound_contextvars

from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.records import EpisodeRecords
from turnwise.episode.setup import EngineClient, EpisodeContext, Limits
from turnwise.episode.waiting import gather_waits
from turnwise.errors import BoundaryError, boundary, text_of
from turnwise.events.dispatch import Observers
from turnwise.events.observer import EpisodesRetried, LimitReached, Wait
from turnwise.protocols import Interaction, Reward, ServiceAgent, ServiceClient, ServingAgent
from turnwise.record.column_specs import ColumnSpec
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.runtime.feed import EpisodeFeed, Numbered
from turnwise.runtime.service import DriverServices
from turnwise.tools.toolbox import ToolBox
from turnwise.types import Fault, Status

Deliver = Callable[[int, EpisodeResult], None]
Connect = Callable[[str], ServiceClient]
"""Returns the client of an agent's service in the driver."""


@define(eq=False)
class KeptParts:
    """The servers of agents and the kept resources of tools, which stay open between episodes of an event loop."""

    addresses: dict[str, str] = field(factory=dict)
    _agents: list[ServingAgent] = field(factory=list)
    _tools: dict[ToolBox, None] = field(factory=dict)
    _opening: asyncio.Lock = field(factory=asyncio.Lock)

    async def open(self, name: str, program: EpisodeProgram, connect: Connect) -> None:
        """Note the tools of a program, and open the servers of its agent; first connect the agent to its service."""
        if program.tools is not None:
            self._tools[program.tools] = None
        agent = program.agent
        # Every episode asks, and `isinstance` alone would take as long as a tenth of a turn.
        if not hasattr(agent, "open") or not isinstance(agent, ServingAgent):
            return
        async with self._opening:  # whoever asks meanwhile needs the addresses, too
            if agent not in self._agents:
                self._agents.append(agent)
                if isinstance(agent, ServiceAgent):
                    agent.connect(connect(name))
                self.addresses.update({**await agent.open(), **self.addresses})

    async def close(self) -> None:
        """Close the servers, and the kept resources of the tools."""
        self.addresses.clear()
        try:
            while self._agents:
                await self._agents.pop().close()
        finally:
            while self._tools:
                await self._tools.popitem()[0].close_kept()


@frozen(kw_only=True)
class WorkerComponents:
    """
    Components of a worker.

    Attributes:
        programs: plugins of an episode by agent name; looking one up may build the agent.
        stop_token_ids: end-of-turn ids of the chat template, added to every request.
        max_in_flight: most episodes at once.
        on_episode_end: called with the key of an episode that has ended, so that the engine can free its contexts.
        default_agent: its servers are open from the start; None for no such agent.
        connect: returns the client of the service of an agent of this name.
        columns: declarations of open columns by name.
    """

    engine: EngineClient
    programs: Mapping[str, EpisodeProgram]
    limits: Limits
    stop_token_ids: tuple[int, ...] = ()
    interaction: Interaction | None = None
    observers: Observers = field(factory=Observers)
    max_in_flight: int = 256
    on_episode_end: Callable[[str], None] = field(default=lambda _key: None)
    default_agent: str | None = None
    connect: Connect = field(factory=lambda: DriverServices().client)
    kept: KeptParts = field(factory=KeptParts)
    columns: Mapping[str, ColumnSpec] = field(factory=dict)

    async def open_servers(self) -> dict[str, str]:
        """Open the servers of the default agent, unless they are open; return the addresses of all servers."""
        name = self.default_agent
        if name is not None and name in self.programs:
            await self.kept.open(name, self.programs[name], self.connect)
        return dict(self.kept.addresses)

    def scored_by(self, reward: Reward) -> WorkerComponents:
        """Return components whose programs have this reward, if they have one."""
        return evolve(self, programs=_RewardedPrograms(self.programs, reward))


@frozen(eq=False)
class _RewardedPrograms(Mapping[str, EpisodeProgram]):
    """Programs with another reward. A program is still built at its first lookup, and by no other call."""

    _programs: Mapping[str, EpisodeProgram]
    _reward: Reward

    def __getitem__(self, name: str) -> EpisodeProgram:
        program = self._programs[name]
        return program if program.reward is None else evolve(program, reward=self._reward)

    def __contains__(self, name: object) -> bool:
        return name in self._programs

    def __iter__(self) -> Iterator[str]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)


@define(eq=False)
class Worker:
    """Drives episodes; events have its name."""

    parts: WorkerComponents
    name: str = "worker 0"
    _live: dict[LiveEpisode, int] = field(factory=dict, init=False)
    _aborting: bool = field(default=False, init=False)
    _interrupted: set[int] = field(factory=set, init=False)

    async def run(self, feed: EpisodeFeed, deliver: Deliver) -> None:
        """
        Run specs until the feed ends; several workers may share one feed.

        `deliver` is called on the event loop with the number and the result of each spec.
        """
        self.resume()
        room = asyncio.Semaphore(self.parts.max_in_flight)
        # The outer group outlives the slots: an episode may end while the engine still handles its abort.
        async with asyncio.TaskGroup() as background, asyncio.TaskGroup() as slots:
            context = self.build_context(background)
            # The first spec of a slot is taken here, so that there are no more slots than specs.
            while await room.acquire() and (first := await feed.take()) is not None:
                slots.create_task(self._run_slot(first, feed, deliver, context, room))

    def build_context(self, background: asyncio.TaskGroup) -> EpisodeContext:
        """Return the parts that episodes share; their background tasks run in the given group."""
        return EpisodeContext(
            engine=self.parts.engine,
            spawn=background.create_task,
            interaction=self.parts.interaction,
            observers=self.parts.observers,
            worker=self.name,
            columns=self.parts.columns,
        )

    def resume(self) -> None:
        """Run new episodes again after an abort."""
        self._aborting = False

    def abort(self) -> None:
        """End soon: running episodes return their state, and further specs are delivered without a start."""
        self._aborting = True
        self.interrupt(frozenset(self._live.values()))

    def interrupt(self, numbers: Collection[int]) -> None:
        """End the episodes with these numbers soon, if they run here."""
        for episode, number in tuple(self._live.items()):
            if number in numbers:
                self._interrupted.add(number)
                episode.abort()

    def waits(self) -> list[Wait]:
        """Return the parts that the running episodes wait for."""
        return gather_waits(self._live)

    def emit_limit_reached(self) -> None:
        """Emit the event that an episode had to wait for a free slot."""
        if self.parts.observers.heard("on_limit_reached"):
            event = LimitReached(limit="rollout.max_in_flight", where=self.name)
            self.parts.observers.emit("on_limit_reached", event)

    async def run_one(self, spec: EpisodeSpec, context: EpisodeContext, number: int = 0) -> EpisodeResult:
        """Run one episode; during an abort, return it without a start."""
        if self._aborting:
            return build_unstarted_result(spec)
        # Every spec has one result, whatever a plugin raises: further up, an exception would end the other episodes.
        try:
            with boundary("infra", self.name):
                return await self._run_live(spec, context, number)
        except Exception as error:  # noqa: BLE001 - becomes the fault of a failed result
            return self._fail(spec, error)

    async def _run_to_end(self, spec: EpisodeSpec, context: EpisodeContext, number: int) -> EpisodeResult:
        """Run one episode, and again after it has lost its workspace or another resource."""
        self._interrupted.discard(number)
        while True:
            result = await self.run_one(spec, context, number)
            if (again := spec.after(result.fault)) is None:
                return result
            if number in self._interrupted:  # as if it had not started, so that it can be resumed
                return build_unstarted_result(spec)
            spec = again
            emit_retried(self.parts.observers, result)

    async def _run_live(self, spec: EpisodeSpec, context: EpisodeContext, number: int) -> EpisodeResult:
        # The driver has built the agent, but this machine may lack a package or a file.
        with boundary("agent", self.name):
            program = self.parts.programs[spec.agent_name]
            await self.parts.kept.open(spec.agent_name, program, self.parts.connect)
        stops = (*spec.sampling.stop_token_ids, *self.parts.stop_token_ids)
        sampling = spec.sampling.with_(stop_token_ids=tuple(dict.fromkeys(stops)))
        episode = LiveEpisode(evolve(spec, sampling=sampling), self.parts.limits, context)
        # Registered before the first await, so that an interrupt never misses a running episode.
        self._live[episode] = number
        try:
            # Lines that tools, rewards and routers log meanwhile name the episode too.
            with bound_contextvars(episode=spec.uid, key=episode.key):
                return await run_episode(episode, program)
        finally:
            del self._live[episode]
            self.parts.on_episode_end(episode.key)

    def _fail(self, spec: EpisodeSpec, error: Exception) -> EpisodeResult:
        owner, cause = (error.owner, error.cause) if isinstance(error, BoundaryError) else ("infra", error)
        fault = Fault(owner=owner, kind=type(cause).__name__, message=" ".join(text_of(error).split()))
        result = build_unrun_result(spec, Status.FAILED, fault)
        self.parts.observers.emit("on_episode_finished", result)
        return result

    async def _run_slot(
        self, first: Numbered, feed: EpisodeFeed, deliver: Deliver, context: EpisodeContext, room: asyncio.Semaphore
    ) -> None:
        taken: Numbered | None = first
        while taken is not None:
            number, spec = taken
            deliver(number, await self._run_to_end(spec, context, number))
            taken = feed.take_waiting()
            if taken is not None and room.locked():
                self.emit_limit_reached()
        room.release()


def emit_retried(observers: Observers, result: EpisodeResult) -> None:
    """Tell that an episode runs again, which has lost a resource."""
    reason = "" if result.fault is None else result.fault.message
    structlog.get_logger().warning("episode runs again", episode=result.uid, reason=reason)
    observers.emit("on_episodes_retried", EpisodesRetried(count=1, worker="", reason=reason))


def build_unstarted_result(spec: EpisodeSpec) -> EpisodeResult:
    """Return the result of an episode that was aborted before its first step, or before it resumed."""
    fault = Fault(owner="infra", kind="EpisodeAborted", message="the run was asked to stop before the episode started")
    unfinished = spec.unfinished or UnfinishedEpisode(spec=spec, started=False)
    return evolve(build_unrun_result(spec, Status.ABORTED, fault), unfinished=unfinished)


def build_unrun_result(spec: EpisodeSpec, status: Status, fault: Fault) -> EpisodeResult:
    """Return the result of an episode that does not run; it has the records of an earlier part, if there was one."""
    earlier = spec.unfinished
    records = EpisodeRecords(entries=[record.rewound() for record in earlier.records] if earlier else [])
    for record in records.entries:
        record.close()
    return EpisodeResult(
        task=spec.task,
        rollout_n=spec.rollout_n,
        global_step=spec.global_step,
        validation=spec.validation,
        agent_name=spec.agent_name,
        status=status,
        fault=fault,
        trajectories=tuple(records.trajectories),
        lineage=records.lineage,
        messages=earlier.messages if earlier else tuple(spec.task.messages),
    )
