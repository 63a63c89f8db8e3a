"""The end of a run on Ray, without a cluster: its actors are stand-ins."""

import asyncio
from types import SimpleNamespace

from turnwise.config.runtime import RuntimeConfig
from turnwise.runtime.ray.runtime import RayRuntime


def test_an_actor_may_die_while_another_one_stops():
    """The supervision takes its handle away meanwhile, and the run ends as usual."""
    runtime = RayRuntime(SimpleNamespace(), RuntimeConfig(name="ray", num_workers=2))
    num_stops = []

    async def stop():
        num_stops.append(1)
        for slot in runtime.workers.slots:
            slot.handle = None

    for slot in runtime.workers.slots:
        slot.handle = SimpleNamespace(stop=SimpleNamespace(remote=stop))
    asyncio.run(runtime.stop())

    assert [1] == num_stops


def test_the_memory_of_replicas_is_known_while_one_of_them_dies():
    """It may die during the question, or be gone before: the sum is that of the others, and no caller fails."""
    runtime = RayRuntime(SimpleNamespace(), RuntimeConfig(name="ray", num_replicas=3))

    async def answer():
        runtime.policy.slots[2].handle = None
        return {"memory_bytes": 5.0}

    async def fail():
        raise ConnectionError("the actor died")

    for slot, stats in zip(runtime.policy.slots, (answer, fail, answer), strict=True):
        slot.handle = SimpleNamespace(stats=SimpleNamespace(remote=stats))

    assert asyncio.run(runtime.memory_bytes()) == 5
