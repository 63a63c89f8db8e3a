"""The end of a run on Ray, without a cluster: its actors are stand-ins."""

import asyncio
from types import SimpleNamespace

import pytest

from turnwise.config.runtime import RuntimeConfig
from turnwise.errors import EngineError
from turnwise.runtime.ray import runtime as runtime_module
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


def make_dying(runtime, method, reply):
    """Return the slots of three actors: one dies during a question, and the third when the first replies."""
    slots = runtime.workers.slots if method == "addresses" else runtime.policy.slots

    async def answer():
        slots[2].handle = None
        return reply

    async def fail():
        raise ConnectionError("the actor died")

    for slot, call in zip(slots, (answer, fail, answer), strict=True):
        slot.handle = SimpleNamespace(**{method: SimpleNamespace(remote=call)})
    return slots


@pytest.mark.parametrize(
    ("method", "reply", "ask", "wanted"),
    [
        ("stats", {"memory_bytes": 5.0}, "memory_bytes", 5),
        ("stats", {"memory_bytes": 5.0}, "stats", [{"memory_bytes": 5.0}, {}, {}]),
        ("addresses", {"a": "http://x"}, "addresses", {"worker 0": {"a": "http://x"}}),
    ],
)
def test_actors_that_die_while_they_are_asked_are_left_out(method, reply, ask, wanted):
    """They may die during the question, or be gone before: the others have replied, and no caller fails."""
    runtime = RayRuntime(SimpleNamespace(), RuntimeConfig(name="ray", num_replicas=3, num_workers=3))
    make_dying(runtime, method, reply)

    assert wanted == asyncio.run(getattr(runtime, ask)())


def test_the_place_of_a_replica_that_dies_is_waited_for(monkeypatch):
    """A trainer that got fewer places than there are replicas would take the wrong devices."""
    monkeypatch.setattr(runtime_module, "_RETRY_S", 0.0)
    runtime = RayRuntime(SimpleNamespace(), RuntimeConfig(name="ray", num_replicas=3))
    slots = make_dying(runtime, "locate", ("node", ["0"]))

    async def locate():
        async with asyncio.TaskGroup() as group:
            located = group.create_task(runtime.locate_replicas())
            await asyncio.sleep(0)
            slots[1].handle = slots[0].handle
            for _ in range(10):
                await asyncio.sleep(0)
            slots[2].handle = slots[0].handle
        return located.result()

    assert 3 * [("node", ["0"])] == asyncio.run(locate())


def test_a_replica_that_was_given_up_has_no_place():
    """The error has the reason."""
    runtime = RayRuntime(SimpleNamespace(), RuntimeConfig(name="ray", num_replicas=1))
    runtime.policy.slots[0].given_up, runtime.policy.slots[0].last_error = True, "no memory"

    with pytest.raises(EngineError, match="replica 0 has no place: no memory"):
        asyncio.run(runtime.locate_replicas())


@pytest.mark.parametrize("at", ["actor", "supervision", "cluster"])
def test_an_interrupt_does_not_cut_the_end_of_ray(at):
    """The caller is cancelled when Ray has ended: a process that ended before would crash in Ray's C++ code."""
    runtime, events, reached = RayRuntime(SimpleNamespace(), RuntimeConfig(name="ray")), [], asyncio.Event()

    async def step(name):
        if name == at:
            reached.set()
            await asyncio.sleep(0.02)
        events.append(name)

    async def supervise():
        try:
            await asyncio.sleep(600)
        finally:
            await step("supervision")

    async def main():
        runtime.workers.slots[0].handle = SimpleNamespace(stop=SimpleNamespace(remote=lambda: step("actor")))
        runtime.cluster = SimpleNamespace(close=lambda *_release, **_options: step("cluster"))
        runtime._supervision = asyncio.ensure_future(supervise())
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(runtime.stop())
        await reached.wait()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping

    asyncio.run(main())
    assert ["supervision", "cluster"] == events[-2:]
