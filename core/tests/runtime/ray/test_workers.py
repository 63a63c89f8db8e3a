"""Messages of the driver to its workers."""

import asyncio
from collections import Counter

import pytest
from attrs import define, field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.ray import workers
from turnwise.runtime.ray.workers import WorkerGroup
from turnwise.runtime.remote.dispatch import EpisodeDispatcher
from turnwise.runtime.remote.supervision import live

SPEC = EpisodeSpec(task=Task(messages=({"role": "user", "content": "hi"},), uid="a"), agent_name="one_turn")


@define
class RecordingHandle:
    """A handle of an actor that counts the messages of each method."""

    messages: Counter = field(factory=Counter)

    def __getattr__(self, name):
        messages = self.messages

        class Method:
            """A remote method."""

            def options(self, **_options):
                return self

            def remote(self, *_arguments):
                messages[name] += 1

        return Method()


def test_an_episode_is_one_message():
    """A submitted episode is a message to its worker, and none to the others: a run may have thousands of workers."""
    config = RuntimeConfig(name="ray", num_workers=50)
    dispatcher = EpisodeDispatcher()
    group = WorkerGroup(blueprint=None, config=config, cluster=None, pools={}, dispatcher=dispatcher)
    for slot in group.slots:
        slot.handle = RecordingHandle()
    dispatcher.submit([(0, SPEC)], lambda _number, _result: None)
    group.distribute()
    sent = sum((slot.handle.messages for slot in group.slots), Counter())
    assert sent == {"submit": 1}


@define(eq=False)
class FakeWorker:
    """
    A handle of a worker, which answers nothing and keeps no episode when it is dead.

    Attributes:
        alive: whether its process runs.
        held: keys of the episodes that it runs.
    """

    alive: bool = True
    held: list = field(factory=list)

    def __getattr__(self, name):
        return FakeMethod(self, name)


@define
class FakeMethod:
    """A method of a `FakeWorker`."""

    worker: FakeWorker
    name: str

    def options(self, **_options):
        return self

    def remote(self, *arguments):
        if self.name != "submit":
            return self._answer()
        if self.worker.alive:
            self.worker.held += [key for key, _spec in arguments[1]]
        return None

    async def _answer(self):
        if not self.worker.alive:
            await asyncio.Event().wait()


async def let_others_run():
    """Let every task of the event loop run until it waits for an event."""
    for _ in range(10):
        await asyncio.sleep(0)


class LostNode:
    """A `WorkerGroup` on two nodes, one of which dies with several workers at the same moment."""

    def __init__(self, num_workers, window):
        config = RuntimeConfig(name="ray", num_workers=num_workers, ray=RayConfig(window=window))
        self.dispatcher, self.results = EpisodeDispatcher(), {}
        self.group = WorkerGroup(blueprint=None, config=config, cluster=None, pools={}, dispatcher=self.dispatcher)
        self.most_kills = 0
        self.group._max_in_flight = dict.fromkeys(range(num_workers), 512)
        self._tasks = {slot.index: self._start(slot) for slot in self.group.slots}

    def _start(self, slot):
        slot.handle = FakeWorker()
        self.group._unverified[slot.index].clear()
        return asyncio.get_running_loop().create_task(self.group._verify(slot))

    def feed(self, count):
        """Add new episodes."""
        self.dispatcher.submit([(len(self.dispatcher.keys), SPEC)] * count, self._deliver)
        self.group.distribute()

    def _deliver(self, _number, result):
        self.results[len(self.results)] = result

    async def discover(self, index):
        """Let the driver learn that a worker is dead."""
        self._tasks[index].cancel()
        self.group.release(self.group.slots[index])
        self.most_kills = max([self.most_kills, *self.dispatcher._kills.values()])
        await let_others_run()

    def restart(self, index):
        """Start a worker on the other node."""
        self._tasks[index] = self._start(self.group.slots[index])
        self.group.submit(self.group.slots[index])

    async def finish(self):
        """Let live workers end their episodes until none is left."""
        for slot in [slot for slot in live(self.group.slots) if slot.handle.alive]:
            while slot.handle.held:
                key = slot.handle.held.pop(0)
                self.dispatcher.complete(slot.index, key, EpisodeResult(task=SPEC.task, status=Status.COMPLETED))
                self.group.submit(slot)
        await let_others_run()


@pytest.fixture
def without_ray(monkeypatch):
    """Actors that are emptied without Ray."""

    def empty(slot):
        slot.handle = None
        return True

    monkeypatch.setattr(workers, "kill_actor", empty)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_workers=st.integers(2, 6),
    window=st.integers(1, 8),
    fed=st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 5)),
    finishing=st.lists(st.booleans(), min_size=6, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_workers_of_a_lost_node_blame_no_episode(without_ray, num_workers, window, fed, finishing, order):
    """
    Most workers die together, and the driver learns of each death separately, while live workers end episodes and new
    ones arrive: no episode counts more than one death, so none is a suspect, and all complete.
    """

    async def run():
        cluster = LostNode(num_workers, window)
        cluster.feed(fed[0])
        dead = order.sample(range(num_workers), num_workers - 1)
        for index in dead:
            cluster.group.slots[index].handle.alive = False
        cluster.feed(fed[1])
        for index, finishes in zip(dead, finishing, strict=False):
            await cluster.discover(index)
            cluster.feed(fed[2])
            if finishes:
                await cluster.finish()
        for index in dead:
            cluster.restart(index)
        for _ in range(20):
            await cluster.finish()
        return cluster

    cluster = asyncio.run(run())
    assert cluster.most_kills <= 1
    assert cluster.dispatcher.keys == []
    assert Counter(result.status for result in cluster.results.values()) == Counter(
        {Status.COMPLETED: fed[0] + fed[1] + fed[2] * (num_workers - 1)}
    )
