"""Weights that are kept for restarted replicas: published ones if the transport lasts, else a copy in host memory."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import EngineError
from turnwise.protocols.weights import WeightManifest
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote import weight_updates
from turnwise.runtime.remote.supervision import make_slots
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise.weights.sources import source_of


class Transport:
    """Publishes the arrays of a source as they are; `open` has the versions whose context is open."""

    def __init__(self, *, reads=True):
        self.open, self.reads = [], reads

    @asynccontextmanager
    async def publish(self, version, weights, num_readers):
        found = list(weights) if self.reads else []
        self.open.append(version)
        try:
            yield WeightManifest(version=version, specs=weights.specs, locator={"weights": found})
        finally:
            self.open.remove(version)


class LastingTransport(Transport):
    """Its versions can be applied as long as they are open."""

    lasting = True


def run(transport, scenario):
    return asyncio.run(scenario(WeightUpdater(transport, "fake")))


def noting(received):
    """Return the update of a replica that notes the arrays it receives."""

    async def update(manifest):
        received.append([array for _name, array in manifest.locator["weights"]])

    return update


def no_kill(_index, reason):
    raise AssertionError(reason)


async def refuse(_manifest):
    """Update a replica that refuses every version."""
    raise EngineError("no such weight")


def test_published_weights_are_kept_without_a_copy():
    """A restarted replica reads what the others read; the next version takes its place, and the last one is freed."""
    transport, arrays, received = LastingTransport(), [np.zeros(2), np.ones(2)], []

    async def scenario(updater):
        states = []
        for version, array in enumerate(arrays, 1):
            await updater.update({0: noting(received)}, source_of({"w": array}), version, no_kill, keep=True)
            await updater.repeat({1: noting(received)}, no_kill)
            states.append(list(transport.open))
        await updater.forget()
        await updater.forget()
        return [*states, list(transport.open), await updater.repeat({0: refuse}, no_kill)]

    assert [[1], [2], [], False] == run(transport, scenario)
    assert [id(array) for array in arrays for _reader in range(2)] == [id(array) for (array,) in received]


@pytest.mark.parametrize("reads", [True, False], ids=["the transport reads all", "it reads nothing"])
def test_other_transports_get_the_weights_as_they_are(reads):
    """The trainer's own array, on its device, is published; a restarted replica gets a copy of the values of then."""
    transport, array, received = Transport(reads=reads), np.zeros(2), []

    async def scenario(updater):
        await updater.update({0: noting(received)}, source_of({"w": array}), 1, no_kill, keep=True)
        array[:] = 7.0
        transport.reads = True
        await updater.repeat({1: noting(received)}, no_kill)
        return list(transport.open)

    assert [] == run(transport, scenario)
    first, (copy,) = received
    assert [array is each for each in first] == [True] * reads
    assert [0.0, 0.0] == copy.tolist()


@pytest.mark.parametrize("transport", [LastingTransport(), Transport()], ids=["lasting", "other"])
def test_a_failed_update_keeps_the_weights_before_it(transport):
    """Replicas serve them, so one that restarts needs them."""
    received = []

    async def scenario(updater):
        await updater.update({0: noting([])}, source_of({"w": np.zeros(1)}), 1, no_kill, keep=True)
        with pytest.raises(EngineError, match="no replica was updated to weight version 2"):
            await updater.update({0: refuse}, source_of({"w": np.ones(1)}), 2, no_kill, keep=True)
        await updater.repeat({0: noting(received)}, no_kill)
        return list(transport.open)

    assert ([1] if isinstance(transport, LastingTransport) else []) == run(transport, scenario)
    assert [0.0] == [array.item() for (array,) in received]


def test_nothing_is_kept_unless_asked():
    """The memory is freed when the update ends."""
    transport = LastingTransport()

    async def scenario(updater):
        await updater.update({0: noting([])}, source_of({"w": np.zeros(1)}), 1, no_kill, keep=False)
        return await updater.repeat({0: refuse}, no_kill), list(transport.open)

    assert (False, []) == run(transport, scenario)


NAMES = ("a", "b", "c", "d")
STEPS = st.lists(
    st.one_of(
        st.sets(st.sampled_from(NAMES), min_size=1).map(lambda names: ("update", sorted(names))),
        st.just(("join", 2)),
        st.integers(0, 2).map(lambda index: ("restart", index)),
    ),
    max_size=12,
)


class Actor:
    """A replica that keeps the last value of each name, and claims the version of its last update."""

    def __init__(self):
        self.weights, self.version = dict.fromkeys(NAMES, 0), 0

        async def update(manifest):
            assert manifest.version > self.version
            found = {name: int(array[0]) for name, array in manifest.locator["weights"]}
            self.weights, self.version = {**self.weights, **found}, manifest.version

        async def ping():
            """Live."""

        self.update_weights = SimpleNamespace(remote=update)
        self.ping = SimpleNamespace(remote=ping)


class GrowingPool:
    """Three slots, of which two start with an actor, and the model that the updates have made."""

    def __init__(self, group, transport, *, keep_last):
        self.group, self.keep_last, self.catching_up = group, keep_last, {}
        self.weights = GroupWeights(WeightUpdater(transport, "fake"), keep_last=keep_last)
        self.slots, self.model, self.version = make_slots("replica", 3), dict.fromkeys(NAMES, 0), 0

    @property
    def served(self):
        return [slot.handle for slot in self.slots if slot.handle]

    async def start(self, index):
        slot, actor = self.slots[index], Actor()
        slot.handle = None
        if task := self.catching_up.pop(index, None):
            task.cancel()

        def enter():
            slot.handle = actor

        self.catching_up[index] = self.group.create_task(self.weights.catch_up(slot, actor, enter))
        for _ in range(200):
            await asyncio.sleep(0)

    async def update(self, names):
        # An update of some names waits for a replica that serves, which these tests would not start.
        if self.served or names == NAMES:
            self.version += 1
            self.model |= dict.fromkeys(names, self.version)
            source = source_of({name: np.full(1, self.version) for name in names})
            await self.weights.update(self.slots, source, self.version, lambda _slot, reason: pytest.fail(reason))
            for _ in range(200):
                await asyncio.sleep(0)

    async def step(self, what, value):
        if what == "update":
            await self.update(value)
        elif (value in self.catching_up) == (what == "restart"):
            await self.start(value)
        assert [(self.model, self.version)] * len(self.served) == [(each.weights, each.version) for each in self.served]
        if self.keep_last:
            assert len(self.catching_up) == len(self.served)


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("keep_last", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("make", [LastingTransport, Transport], ids=["lasting", "other"])
@settings(max_examples=60)
@given(steps=STEPS)
def test_all_replicas_that_serve_have_the_same_weights(make, keep_last, steps):
    """With any names in the updates, and any start of a replica: it has all of them, or does not serve yet."""
    transport = make()

    async def main():
        async with asyncio.TaskGroup() as group:
            pool = GrowingPool(group, transport, keep_last=keep_last)
            for step in (("join", 0), ("join", 1), *steps, ("update", NAMES)):
                await pool.step(*step)
                assert len(transport.open) <= len(NAMES)
            assert len(pool.catching_up) == len(pool.served)
            await pool.weights.updater.forget()

    asyncio.run(main())
    assert [] == transport.open


@pytest.mark.parametrize("interrupted", [False, True], ids=["timeout", "interrupt"])
def test_weights_are_lent_until_every_reader_has_ended(interrupted, monkeypatch):
    """A timeout or an interrupt kills a late replica first, so nothing reads weights that change afterwards."""
    monkeypatch.setattr(weight_updates, "_INTERRUPTED_S", 0.0)
    transport, killed, started, ended = Transport(), [], asyncio.Event(), asyncio.Event()

    async def slow(_manifest):
        started.set()
        await ended.wait()
        assert [1] == transport.open
        raise ConnectionError("the actor died")

    def kill(index, reason):
        killed.append((index, reason))
        asyncio.get_running_loop().call_later(0.02, ended.set)

    async def main():
        updater = WeightUpdater(transport, "fake", timeout_s=1000.0 if interrupted else 0.01)
        replicas = {0: noting([]), 1: slow}
        source = source_of({"w": np.zeros(1)})
        updating = asyncio.ensure_future(updater.update(replicas, source, 1, kill, keep=False))
        if interrupted:
            await started.wait()
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
            return []
        report = await updating
        return [(each.error, each.torn) for each in report.replicas]

    outcome = asyncio.run(main())
    assert [] == transport.open
    assert [1] == [index for index, _reason in killed]
    assert outcome == ([] if interrupted else [("", False), ("replica 1 did not finish within 0.01 s", True)])
