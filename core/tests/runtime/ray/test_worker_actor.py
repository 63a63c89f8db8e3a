"""The worker's actor in one process, without Ray."""

import asyncio
from functools import partial

from attrs import define, field, frozen

from turnwise import State
from turnwise.driver import Recipe
from turnwise.episode_setup import Limits
from turnwise.episode_spec import EpisodeSpec
from turnwise.observer import Observer
from turnwise.routing import RoundRobin
from turnwise.runtime.pool_client import Peer
from turnwise.runtime.ray_actors import WorkerActor
from turnwise.runtime.replica_server import ReplicaServer
from turnwise.runtime.result_wire import unpack_episodes
from turnwise.runtime.worker import WorkerParts
from turnwise.telemetry import Observers
from turnwise.types import Capabilities, FinishReason, GenerateResult, Status, Task

TURNS = 4


class FourTurns:
    """Four turns with an observation between them."""

    async def step(self, episode):
        """Make one transition."""
        if episode.state == State.PENDING:
            episode.begin([1, 2, 3])
            return State.GENERATING
        await episode.generate(max_tokens=2)
        if len(episode.trajectory.turns()) == TURNS:
            return State.TERMINATED
        episode.observe([4])
        return State.GENERATING


@define
class Ends(Observer):
    """Counts episodes that have ended."""

    count: int = 0

    def on_episode_finished(self, event):
        """Count one."""
        self.count += 1


@define
class CountingEngine:
    """Answers at once, and notes how many episodes had ended when it did."""

    ends: Ends
    noted: list[int] = field(factory=list)
    capabilities = Capabilities()

    async def start(self):
        """Nothing to start."""

    async def generate(self, request):
        """Answer two tokens."""
        self.noted.append(self.ends.count)
        return GenerateResult(token_ids=[7, 8], logprobs=[-0.5, -0.5], finish_reason=FinishReason.STOP)

    async def abort(self, request_id):
        """Nothing to abort."""

    async def stop(self):
        """Nothing to stop."""


@frozen
class Blueprint:
    """The parts of a worker that one observer listens to."""

    ends: Ends

    def make_parts(self, engine):
        """Build them."""
        recipe = Recipe(agent=FourTurns())
        observers = Observers.of([self.ends])
        return WorkerParts(engine=engine, recipes={"four": recipe}, limits=Limits(), observers=observers)

    def make_router(self):
        """Build a router."""
        return RoundRobin()


async def run(num_episodes):
    """Run episodes in an actor with one replica beside it, and return the engine and the results by number."""
    ends = Ends()
    engine = CountingEngine(ends)
    actor, server = WorkerActor("w", Blueprint(ends), {"policy": Peer(engine.capabilities, 1)}), ReplicaServer(engine)
    results = {}
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(actor.watch())
        await asyncio.sleep(0)

        async def carry(take, message):
            for _ in range(3):  # as long as messages between processes take in passes of a busy loop
                await asyncio.sleep(0)
            take(message)

        pool = actor._pools["policy"]
        server.connect("w", lambda message: group.create_task(carry(partial(pool.receive, 0), message)))
        receive = partial(server.receive, "w", group=group)
        pool.replica_up(0, lambda message: group.create_task(carry(receive, message)))
        specs = [EpisodeSpec(task=Task(messages=(), uid=str(n)), agent_name="four") for n in range(num_episodes)]
        submitting = group.create_task(actor.submit(list(enumerate(specs))))
        while len(results) < num_episodes:
            message, _events = await actor.collect()
            results |= dict(unpack_episodes(message))
        await submitting
        await actor.stop()
        await watching
    return engine, results


def test_every_episode_is_collected_once():
    """The actor hands over what it was given, under the numbers it was given."""
    _engine, results = asyncio.run(run(40))
    assert list(range(40)) == sorted(results)
    assert {Status.COMPLETED} == {result.status for result in results.values()}
    assert [str(number) for number in results] == [result.task.uid for result in results.values()]


def test_episodes_do_not_end_all_at_once():
    """With an engine that answers at once, most episodes have ended before the last answer of the run."""
    engine, _results = asyncio.run(run(256))
    assert TURNS * 256 == len(engine.noted)
    assert engine.noted[-1] >= 256 * 7 // 8
