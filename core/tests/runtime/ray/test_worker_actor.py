"""The actor of a worker in one process, without Ray."""

import asyncio
import gc
from functools import partial

import pytest
from attrs import define, evolve, field, frozen
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from turnwise import State
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.ray.pool_client import PoolSpec
from turnwise.runtime.ray.worker_actor import WorkerActor
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.runtime.remote.result_wire import unpack_episodes
from turnwise.runtime.worker import WorkerComponents
from turnwise.types import Capabilities, FinishReason, GenerateResult, Status, Task
from turnwise_routers import LeastTokens
from turnwise_testing.simulation.virtual_loop import VirtualLoop

TURNS = 4


class FourTurns:
    """Four turns with an observation between them."""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin([1, 2, 3])
            return State.GENERATING
        await episode.generate(max_tokens=2)
        if len(episode.trajectory.turns()) == TURNS:
            return State.TERMINATED
        episode.observe([4])
        return State.GENERATING


@define
class EpisodeCounter(Observer):
    """Counts started and finished episodes."""

    num_started: int = 0
    num_ended: int = 0

    def on_episode_started(self, event):
        self.num_started += 1

    def on_episode_finished(self, event):
        self.num_ended += 1


@define
class CountingEngine:
    """Returns results at once, and records how many episodes had finished at each of them."""

    counter: EpisodeCounter
    num_ended: list[int] = field(factory=list)
    capabilities = Capabilities()

    async def start(self):
        pass

    async def generate(self, request):
        self.num_ended.append(self.counter.num_ended)
        return GenerateResult(token_ids=[7, 8], logprobs=[-0.5, -0.5], finish_reason=FinishReason.STOP)

    async def abort(self, request_id):
        pass

    async def stop(self):
        pass


@frozen
class Blueprint:
    """The parts of a worker with one observer."""

    counter: EpisodeCounter
    max_in_flight: int

    def make_components(self, engine, judge=None):
        program = EpisodeProgram(agent=FourTurns())
        observers = Observers.of([self.counter])
        return WorkerComponents(
            engine=engine,
            programs={"four": program},
            limits=Limits(),
            observers=observers,
            max_in_flight=self.max_in_flight,
        )

    def make_router(self):
        return LeastTokens()


async def run(num_episodes, max_in_flight=256, on_collect=lambda _counter, _results: None, gap_s=0.0):
    """
    Run episodes in an actor with one replica, and return the engine and the results by number.

    `on_collect` is called after each message, when the actor has done all that it does before the next one.
    """
    counter = EpisodeCounter()
    engine = CountingEngine(counter)
    actor = WorkerActor("w", Blueprint(counter, max_in_flight), {"policy": PoolSpec(engine.capabilities, 1)})
    server = ReplicaServer(engine)
    results = {}
    await actor.open()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(actor.watch(0))
        await asyncio.sleep(0)

        async def deliver(receive, message):
            for _ in range(3):  # a message between processes takes about as many passes of a busy loop
                await asyncio.sleep(0)
            receive(message)

        pool = actor._pools["policy"]
        server.connect(0, lambda message: group.create_task(deliver(partial(pool.receive, 0), message)))
        receive = partial(server.receive, 0, group=group)
        pool.replica_up(0, lambda message: group.create_task(deliver(receive, message)))
        specs = [EpisodeSpec(task=Task(messages=(), uid=str(n)), agent_name="four") for n in range(num_episodes)]
        submitting = group.create_task(actor.submit(1, list(enumerate(specs))))
        while len(results) < num_episodes:
            message, _events = await actor.collect(gap_s)
            for _ in range(100):
                await asyncio.sleep(0)
            on_collect(counter, results)
            results |= dict(unpack_episodes(message))
        await submitting
        await actor.stop()
        await watching
    return engine, results


def test_every_episode_is_collected_once():
    """The actor returns every submitted episode under its number."""
    _engine, results = asyncio.run(run(40))
    assert list(range(40)) == sorted(results)
    assert {Status.COMPLETED} == {result.status for result in results.values()}
    assert [str(number) for number in results] == [result.task.uid for result in results.values()]


@pytest.mark.slow
def test_replies_wait_for_more_episodes():
    """With a long gap the first reply comes at once, the last when nothing runs, and all others are full."""
    sizes = []
    _engine, results = asyncio.run(
        run(600, max_in_flight=700, gap_s=1000.0, on_collect=lambda _counter, before: sizes.append(len(before)))
    )
    assert list(range(600)) == sorted(results)
    replies = [after - before for before, after in zip(sizes, [*sizes[1:], 600], strict=True)]
    assert replies[0] < 256
    assert all(size == 256 for size in replies[1:-1])


def test_a_reply_does_not_wait_for_slots_that_only_it_frees():
    """All slots hold finished episodes, so nothing runs."""
    _engine, results = asyncio.run(run(20, max_in_flight=3, gap_s=1000.0))
    assert list(range(20)) == sorted(results)


@pytest.mark.slow
def test_episodes_do_not_end_all_at_once():
    """With an engine without latency, most episodes have finished before the last result of the engine."""
    engine, _results = asyncio.run(run(256))
    assert TURNS * 256 == len(engine.num_ended)
    assert engine.num_ended[-1] >= 256 * 7 // 8


def test_started_episodes_are_the_oldest_undelivered_ones():
    """
    If the process dies now, with its last message, at most `max_in_flight` of the undelivered episodes had started.

    The dispatcher counts the death of a worker for these alone.
    """
    not_started = []

    def check(counter, delivered):
        assert counter.num_started <= len(delivered) + 3
        not_started.append(20 - counter.num_started)

    _engine, results = asyncio.run(run(20, max_in_flight=3, on_collect=check))
    assert list(range(20)) == sorted(results)
    assert not_started[0] == 17
    assert not_started[-1] == 0


def test_collections_do_not_visit_the_objects_of_the_start():
    """When the first episodes run, the modules and the parts of the actor are frozen."""
    num_frozen = []
    gc.unfreeze()  # what the tests froze
    asyncio.run(run(1, on_collect=lambda *_: num_frozen.append(gc.get_freeze_count())))
    assert num_frozen[0] > 10_000


def test_full_collections_wait_for_growth():
    """As long as the actor runs tasks; afterwards Python's rule holds again."""
    before, meanwhile = gc.get_threshold(), []
    asyncio.run(run(1, on_collect=lambda *_: meanwhile.append(gc.get_threshold()[2])))
    assert all(threshold > 1_000_000 for threshold in meanwhile)
    assert (before, 1) == (gc.get_threshold(), len(meanwhile))


class ServingTurns(FourTurns):
    """An agent with a server."""

    def __init__(self):
        self.news = []

    async def open(self):
        self.news.append("open")
        return {"agents": "http://127.0.0.1:1"}

    async def close(self):
        self.news.append("close")


def test_all_who_ask_while_servers_open_get_the_addresses():
    """The start of the actor and the driver may ask at once: both wait for the one opening."""
    agent, may_open = ServingTurns(), asyncio.Event()
    real_open = agent.open

    async def open_later():
        await may_open.wait()
        return await real_open()

    agent.open = open_later
    components = evolve(
        Blueprint(EpisodeCounter(), 1).make_components(None),
        programs={"four": EpisodeProgram(agent=agent)},
        default_agent="four",
    )

    async def main():
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(components.open_servers()) for _ in range(3)]
            await asyncio.sleep(0)
            may_open.set()
        assert [{"agents": "http://127.0.0.1:1"}] * 3 == [each.result() for each in asking]
        assert ["open"] == agent.news

    asyncio.run(main())


def test_servers_of_agents_are_open_from_start_to_stop():
    """The actor opens those of the default agent once, whoever asks for addresses, and closes them at its end."""
    agent = ServingTurns()
    components = evolve(
        Blueprint(EpisodeCounter(), 1).make_components(None),
        programs={"four": EpisodeProgram(agent=agent)},
        default_agent="four",
    )

    async def main():
        actor = WorkerActor("w", Blueprint(EpisodeCounter(), 1), {"policy": PoolSpec(Capabilities(), 1)})
        actor._worker.parts = components
        async with asyncio.TaskGroup() as group:
            assert components.max_in_flight == await actor.open()
            group.create_task(actor.watch(0))
            assert {"agents": "http://127.0.0.1:1"} == await actor.addresses() == await actor.addresses()
            assert ["open"] == agent.news
            await actor.stop()
        assert ["open", "close"] == agent.news

    asyncio.run(main())


MESSAGES = (
    ("watch",),
    ("submit", [0, 1]),
    ("interrupt", [0]),
    ("submit", [2, 3]),
    ("interrupt", [1, 2]),
    ("abort",),
)
"""In the order in which a driver sends them. Large ones are late in Ray, so they arrive in any order."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(arrived=[0, 2, 1, 3, 4, 5])  # an interrupt before its episodes
@example(arrived=[0, 1, 2, 4, 5, 3])  # the end of a run before its last episodes
@example(arrived=[1, 0, 3, 2, 4, 5])  # episodes before there is a task group for them
@example(arrived=[0, 3, 1, 2, 4, 5])  # two calls with episodes, whose order tells which of them have started
@given(arrived=st.permutations(range(len(MESSAGES))))
def test_messages_in_any_order_end_all_episodes(arrived):
    """No replica answers, so only an interrupt ends an episode: one that overtakes its episodes must not be lost."""
    counter = EpisodeCounter()

    async def collect_all(actor):
        results = {}
        async with asyncio.timeout(3600):  # in virtual time
            while len(results) < 4:
                message, _events = await actor.collect()
                results |= dict(unpack_episodes(message))
        return results

    async def main():
        actor = WorkerActor("w", Blueprint(counter, 1), {"policy": PoolSpec(Capabilities(), 1)})
        await actor.open()
        async with asyncio.TaskGroup() as group:
            for number in arrived:
                method, *numbers = MESSAGES[number]
                if method == "submit":
                    numbers = [
                        [(n, EpisodeSpec(task=Task(messages=(), uid=str(n)), agent_name="four")) for n in numbers[0]]
                    ]
                group.create_task(getattr(actor, method)(number, *numbers))
                await asyncio.sleep(0)
            results = await collect_all(actor)
            await actor.stop()
        assert 0 == actor.call_order.num_waiting
        return results

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        results = runner.run(main())

    assert {Status.ABORTED} == {result.status for result in results.values()}
    assert [0, 1, 2, 3] == sorted(results)
    assert counter.num_started <= 2  # with one slot, 1 can only start when 0 was interrupted in it
