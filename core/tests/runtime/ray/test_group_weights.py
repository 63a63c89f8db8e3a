"""Weight updates of a pool whose replicas have died: the update waits for one that is started again. Without Ray."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.errors import EngineError
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.supervision import make_slots
from turnwise.runtime.remote.weight_updates import WeightUpdater

WEIGHTS = {"w": np.zeros(2, np.float32)}


class Transport:
    """Publishes nothing; replicas only count their updates."""

    @asynccontextmanager
    async def publish(self, version, source, num_readers):
        yield version


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
            await weights.catch_up(0, dead := make_handle(alive=False), lambda: setattr(slots[0], "handle", dead))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not updating.done()
        await weights.catch_up(1, new := make_handle(), lambda: setattr(slots[1], "handle", new))
        return await updating

    report = run(body)
    assert 1 in [each.replica for each in report.replicas if not each.error]


def test_an_update_that_is_refused_is_not_repeated():
    """The replica lives, so the update fails at once."""

    async def body(weights, slots, updating):
        await weights.catch_up(0, new := make_handle(refuses=True), lambda: setattr(slots[0], "handle", new))
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
