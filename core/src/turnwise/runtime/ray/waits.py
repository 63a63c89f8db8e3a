"""The parts that a run on Ray waits for: the waits of its workers, and actors that are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from turnwise.events.observer import Wait
from turnwise.runtime.ray.workers import WorkerGroup
from turnwise.runtime.remote.supervision import ActorSlot

_REPLY_S: Final = 5.0


async def gather_actor_waits(slots: Sequence[ActorSlot], workers: WorkerGroup, missing: dict[str, float]) -> list[Wait]:
    """
    Return the waits of a run.

    Args:
        slots: of all actors.
        workers: run the episodes.
        missing: the time of the loop since which an actor is missing, by its name; this function keeps it.
    """
    async with asyncio.TaskGroup() as group:
        asked = {slot.index: group.create_task(_ask(slot)) for slot in workers.slots if slot.handle is not None}
    now = asyncio.get_running_loop().time()
    silent = [slot for slot in workers.slots if slot.index in asked and asked[slot.index].result() is None]
    states = {f"the start of {slot.name}": slot for slot in slots if slot.handle is None and not slot.given_up}
    states |= {f"an answer of {slot.name}": slot for slot in silent}
    for name in missing.keys() - states.keys():
        del missing[name]
    waits = [wait for task in asked.values() for wait in task.result() or ()]
    for name, slot in states.items():
        seconds = now - missing.setdefault(name, now - _REPLY_S if slot in silent else now)
        held = workers.dispatcher.count_held(slot.index) if slot in workers.slots else 0
        waits.append(Wait(part=name, num_episodes=held, seconds=seconds, shortest_s=seconds))
    return sorted(waits, key=lambda wait: -wait.seconds)


async def _ask(slot: ActorSlot) -> list[Wait] | None:
    """Return the waits of a worker; None if it does not answer."""
    try:
        async with asyncio.timeout(_REPLY_S):
            found: list[Wait] = await slot.handle.waits.remote()
            return found
    except Exception:  # noqa: BLE001 - its supervision handles its death
        return None
