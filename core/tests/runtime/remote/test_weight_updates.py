"""Weights that are kept for restarted replicas: published ones if the transport lasts, else a copy in host memory."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from turnwise.errors import EngineError
from turnwise.protocols.weights import WeightManifest
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


async def refuse(_manifest):
    """Update a replica that refuses every version."""
    raise EngineError("no such weight")


def test_published_weights_are_kept_without_a_copy():
    """A restarted replica reads what the others read; the next version takes its place, and the last one is freed."""
    transport, arrays, received = LastingTransport(), [np.zeros(2), np.ones(2)], []

    async def scenario(updater):
        states = []
        for version, array in enumerate(arrays, 1):
            await updater.update({0: noting(received)}, source_of({"w": array}), version, keep=True)
            await updater.repeat({1: noting(received)}, version)
            states.append(list(transport.open))
        await updater.forget()
        await updater.forget()
        return [*states, list(transport.open), await updater.repeat({0: refuse}, 2)]

    assert [[1], [2], [], False] == run(transport, scenario)
    assert [id(array) for array in arrays for _reader in range(2)] == [id(array) for (array,) in received]


@pytest.mark.parametrize("reads", [True, False], ids=["the transport reads all", "it reads nothing"])
def test_other_transports_get_the_weights_as_they_are(reads):
    """The trainer's own array, on its device, is published; a restarted replica gets a copy of the values of then."""
    transport, array, received = Transport(reads=reads), np.zeros(2), []

    async def scenario(updater):
        await updater.update({0: noting(received)}, source_of({"w": array}), 1, keep=True)
        array[:] = 7.0
        transport.reads = True
        await updater.repeat({1: noting(received)}, 1)
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
        await updater.update({0: noting([])}, source_of({"w": np.zeros(1)}), 1, keep=True)
        with pytest.raises(EngineError, match="no replica was updated to weight version 2"):
            await updater.update({0: refuse}, source_of({"w": np.ones(1)}), 2, keep=True)
        await updater.repeat({0: noting(received)}, 1)
        return list(transport.open)

    assert ([1] if isinstance(transport, LastingTransport) else []) == run(transport, scenario)
    assert [0.0] == [array.item() for (array,) in received]


def test_nothing_is_kept_unless_asked():
    """The memory is freed when the update ends."""
    transport = LastingTransport()

    async def scenario(updater):
        await updater.update({0: noting([])}, source_of({"w": np.zeros(1)}), 1)
        return await updater.repeat({0: refuse}, 1), list(transport.open)

    assert (False, []) == run(transport, scenario)
