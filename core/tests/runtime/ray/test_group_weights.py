"""Weight updates of a pool whose replicas have died: the update waits for one that is started again. Without Ray."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.config.runtime import RayConfig
from turnwise.errors import EngineError
from turnwise.protocols.weights import WeightManifest
from turnwise.runtime.placement import PoolPlacement
from turnwise.runtime.ray import replicas
from turnwise.runtime.ray.replicas import ReplicaGroup
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.channel import ChannelAddress
from turnwise.runtime.remote.supervision import failure_reason, make_slots
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise.types import Capabilities

WEIGHTS = {"w": np.zeros(2, np.float32)}


class Transport:
    """Publishes nothing; replicas only count their updates."""

    @asynccontextmanager
    async def publish(self, version, source, num_readers):
        yield WeightManifest(version=version, specs=source.specs)


def make_handle(*, alive=True, refuses=False):
    """Return a handle of an actor that accepts updates, refuses them, or has died."""

    async def reply(*_arguments):
        if not alive:
            raise ConnectionError("the actor died")

    async def update(manifest):
        await reply()
        if refuses:
            raise EngineError("no such weight")

    return SimpleNamespace(update_weights=SimpleNamespace(remote=update), ping=SimpleNamespace(remote=reply))


async def update(weights, slots):
    """Return the report of an update, or the text of its error."""
    try:
        return await weights.update(slots, WEIGHTS, 1, lambda slot, reason: None)
    except EngineError as error:
        return str(error)


def run(body):
    """Run a body with the weights and the slots of a pool of two replicas."""

    async def main():
        weights = GroupWeights(WeightUpdater(Transport(), "fake"), keep_last=False)
        slots = make_slots("replica", 2)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            updating = group.create_task(update(weights, slots))
            for _ in range(100):
                await asyncio.sleep(0)
            return await body(weights, slots, updating)

    return asyncio.run(main())


@pytest.mark.parametrize("notices", [True, False], ids=["the supervision knows it", "it does not know yet"])
def test_an_update_waits_for_a_replica_that_starts(notices):
    """It updates the new replica, whether or not the death of the others was noticed before it started."""

    async def body(weights, slots, updating):
        assert not updating.done()
        if not notices:
            await weights.catch_up(
                slots[0], dead := make_handle(alive=False), lambda: setattr(slots[0], "handle", dead)
            )
            for _ in range(100):
                await asyncio.sleep(0)
            assert not updating.done()
        await weights.catch_up(slots[1], new := make_handle(), lambda: setattr(slots[1], "handle", new))
        return await updating

    report = run(body)
    assert 1 in [each.replica for each in report.replicas if not each.error]


def test_an_update_that_is_refused_is_not_repeated():
    """The replica lives, so the update fails at once."""

    async def body(weights, slots, updating):
        await weights.catch_up(slots[0], new := make_handle(refuses=True), lambda: setattr(slots[0], "handle", new))
        return await updating

    assert run(body) == "no replica was updated to weight version 1: EngineError: no such weight"


def test_an_update_fails_when_every_replica_is_given_up():
    """No replica will start, so waiting is useless."""

    async def body(weights, slots, updating):
        slots[0].given_up = True
        await weights.notify_given_up()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not updating.done()
        slots[1].given_up = True
        await weights.notify_given_up()
        return await updating

    assert run(body) == "there is no replica to update"


def test_an_update_does_not_wait_while_the_pool_sleeps():
    """A replica starts only after the wake-up, which follows the update."""

    async def main():
        weights = GroupWeights(WeightUpdater(Transport(), "fake"), keep_last=False)
        weights.sleep_state.mark_asleep(1)
        async with asyncio.timeout(30):
            return await update(weights, make_slots("replica", 1))

    assert asyncio.run(main()) == "there is no replica to update"


def test_some_weights_are_refused_when_every_replica_waits_for_all():
    """No replica would ever enter rotation, so the update does not wait; all weights let them enter."""

    async def main():
        weights, slots = GroupWeights(WeightUpdater(Transport(), "fake"), keep_last=False), make_slots("replica", 2)
        slots[0].handle = make_handle()
        both = {name: np.zeros(2, np.float32) for name in ("w", "v")}
        await weights.update(slots, both, 1, lambda slot, reason: None)
        slots[0].handle, slots[1].given_up = None, True
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(
                weights.catch_up(slots[0], new := make_handle(), lambda: setattr(slots[0], "handle", new))
            )
            with pytest.raises(EngineError, match="every replica waits for all weights"):
                await weights.update(slots, WEIGHTS, 2, lambda slot, reason: None)
            report = await weights.update(slots, both, 3, lambda slot, reason: None)
        return [each.error for each in report.replicas], slots[0].handle is new

    assert asyncio.run(main()) == ([""], True)


def test_a_replica_that_dies_while_it_waits_for_weights_is_started_again(monkeypatch):
    """Its start fails, and the next one waits in its place; a dead one would fail every later update."""
    killed, weights = [], GroupWeights(WeightUpdater(Transport(), "fake"), keep_last=False)
    monkeypatch.setattr(replicas, "kill", killed.append)

    async def main():
        dying = asyncio.get_running_loop().create_future()
        handle = make_handle()
        address = ChannelAddress("host", 1, b"")
        handle.start = SimpleNamespace(remote=partial(asyncio.sleep, 0, Capabilities()))
        handle.listen = SimpleNamespace(remote=lambda _number: asyncio.sleep(0, address))
        handle.watch = SimpleNamespace(remote=lambda _number: dying)
        handle.check_built = SimpleNamespace(remote=partial(asyncio.sleep, 0))
        cluster = SimpleNamespace(run_name="run", start_actor=lambda *_, **__: asyncio.sleep(0, handle))
        group = ReplicaGroup(SimpleNamespace(), PoolPlacement(), RayConfig(), cluster, list, weights)
        weights.version = 1
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(start(group))
            await group.slots[0].settled.wait()  # it waits for weights
            dying.set_exception(ConnectionError("the actor died"))
            return await starting, killed == [handle], await update(weights, [])

    async def start(group):
        try:
            await group.start(group.slots[0])
        except ExceptionGroup as error:
            return failure_reason(error)

    assert asyncio.run(main()) == ("ConnectionError: the actor died", True, "there is no replica to update")


class Replica:
    """A handle that notes its calls; `fails` raises in them."""

    def __init__(self, *, fails=False):
        self.calls, self.fails = [], fails

    def __getattr__(self, method):
        async def call(argument):
            self.calls.append((method, argument))
            if self.fails:
                raise ConnectionError("the actor died")

        return SimpleNamespace(remote=call)


def in_pool(body, *replicas, keep_last=False):
    """Run a body with weights and a pool of these replicas."""

    async def main():
        weights, slots = GroupWeights(WeightUpdater(Transport(), "fake"), keep_last=keep_last), make_slots("replica", 3)
        for slot, replica in zip(slots, replicas, strict=False):
            slot.handle = replica
        async with asyncio.timeout(30):
            return await body(weights, slots)

    return asyncio.run(main())


class TestMemoryOfAPool:
    """Sleep and wake-up of all replicas, also of replicas that start meanwhile."""

    def test_a_replica_that_fails_is_named(self):
        """The others sleep, and the pool counts as asleep: the trainer may use the memory only if it looks."""

        async def body(weights, slots):
            with pytest.raises(EngineError, match=r"^sleep failed: replica 1: .*the actor died"):
                await weights.sleep(slots, 1, (1, 2))
            return weights.sleep_state.level

        healthy = Replica()
        assert 1 == in_pool(body, healthy, Replica(fails=True))
        assert [("sleep", 1)] == healthy.calls

    def test_a_replica_that_starts_meanwhile_falls_asleep(self):
        """With the memory that the others have already taken again."""

        async def body(weights, slots):
            await weights.sleep(slots, 2, (1, 2))
            await weights.wake_up(slots, ("weights",))
            await weights.catch_up(slots[1], late, lambda: setattr(slots[1], "handle", late))
            await weights.wake_up(slots, ("kv_cache",))
            await weights.wait_until_awake()

        early, late = Replica(), Replica()
        in_pool(body, early, keep_last=True)
        assert [("sleep", 2), ("wake_up", ("weights",)), ("wake_up", ("kv_cache",))] == early.calls == late.calls

    def test_a_replica_keeps_the_weights_that_came_after_the_sleep(self):
        """A new replica sleeps before it gets the weights that came after the sleep, and keeps them."""

        async def body(weights, slots):
            await weights.sleep(slots, 2, (1, 2))
            await weights.wake_up(slots, ("weights",))
            await weights.update(slots, WEIGHTS, 1, lambda slot, reason: None)
            await weights.catch_up(slots[1], late, lambda: setattr(slots[1], "handle", late))
            await weights.wake_up(slots, ("kv_cache",))

        early, late = Replica(), Replica()
        in_pool(body, early, keep_last=True)
        last = [("sleep", 2), ("wake_up", ("weights",)), "update", ("wake_up", ("kv_cache",))]
        assert last == [call if call[0] != "update_weights" else "update" for call in late.calls][-4:]

    def test_a_restarted_replica_gets_the_last_weights(self):
        """A copy of the weights, because the trainer changes its own."""

        async def body(weights, slots):
            await weights.update(slots, WEIGHTS, 1, lambda slot, reason: None)
            await weights.catch_up(slots[1], late, lambda: setattr(slots[1], "handle", late))
            return weights.version

        early, late = Replica(), Replica()
        assert 1 == in_pool(body, early, keep_last=True)
        assert (
            [1] == [manifest.version for _, manifest in early.calls] == [manifest.version for _, manifest in late.calls]
        )

    def test_a_replica_that_misses_an_update_is_killed(self):
        """It would sample with other weights than the version says."""
        killed = []

        async def body(weights, slots):
            await weights.update(slots, WEIGHTS, 1, lambda slot, reason: killed.append((slot.index, reason)))

        in_pool(body, Replica(), Replica(fails=True))
        ((index, reason),) = killed
        assert 1 == index
        assert reason.startswith("it was not updated to weight version 1: ")
