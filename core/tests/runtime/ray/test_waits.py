"""The parts that a run on Ray waits for; no Ray is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from turnwise import Capabilities
from turnwise.events.observer import Wait
from turnwise.runtime.ray.waits import gather_actor_waits
from turnwise.runtime.remote.dispatch import EpisodeDispatcher
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.runtime.remote.supervision import ActorSlot, make_slots
from turnwise_routers import LeastTokens
from turnwise_testing.simulation.virtual_loop import VirtualLoop


def handle_of(waits: Any) -> SimpleNamespace:
    """Return an actor whose method `waits` is a coroutine function."""
    return SimpleNamespace(waits=SimpleNamespace(remote=waits))


async def answers() -> list[Wait]:
    return [Wait(part="replica 1", num_episodes=2, seconds=12.0, shortest_s=11.0)]


async def hangs() -> None:
    await asyncio.Event().wait()


async def dies() -> None:
    raise RuntimeError("the actor is dead")


def test_missing_actors_are_waits_beside_those_of_the_workers() -> None:
    """A worker that does not answer, one that has no process, and a replica that starts; with the time since then."""
    workers, replicas = make_slots("worker", 4), make_slots("replica", 2)
    for slot, waits in zip(workers, (answers, hangs, dies), strict=False):
        slot.handle = handle_of(waits)
    replicas[0].handle, replicas[1].given_up = handle_of(answers), True
    group, missing = SimpleNamespace(slots=workers, dispatcher=EpisodeDispatcher()), dict[str, float]()

    async def look_twice() -> list[list[Wait]]:
        slots: list[ActorSlot] = [*replicas, *workers]
        first = await gather_actor_waits(slots, group, missing)  # type: ignore[arg-type]  # it needs these two alone
        await asyncio.sleep(10)
        workers[1].handle = handle_of(answers)
        return [first, await gather_actor_waits(slots, group, missing)]  # type: ignore[arg-type]  # as above

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        first, second = runner.run(look_twice())

    names = {"replica 1": 12, "an answer of worker 1": 5, "an answer of worker 2": 5, "the start of worker 3": 0}
    assert names == {wait.part: round(wait.seconds) for wait in first}
    assert {"replica 1": 12, "an answer of worker 2": 15, "the start of worker 3": 10} == {
        wait.part: round(wait.seconds) for wait in second
    }
    assert missing.keys() == {"an answer of worker 2", "the start of worker 3"}


def test_a_request_is_at_its_replica() -> None:
    """Or it waits for one that lives."""
    pool = ReplicaPool(LeastTokens(), Capabilities(), num_replicas=3)
    pool._links[2].pending["a"] = None  # type: ignore[assignment]  # only its name counts
    assert "replica 2" == pool.locate_request("a")
    assert "a replica that lives" == pool.locate_request("b")
