"""Watching one actor, which is a stand-in."""

import asyncio

import pytest
from attrs import define, field

from turnwise.config.runtime import RayConfig
from turnwise.runtime.ray.calls import watch_with_pings
from turnwise.runtime.remote.supervision import ActorSlot, failure_reason


@define(eq=False)
class Handle:
    """A handle of an actor that replies at once, and records the calls."""

    called: list = field(factory=list)

    def __getattr__(self, name):
        self.called.append(name)
        return self

    async def remote(self):
        return None


@pytest.mark.parametrize("in_time", [True, False], ids=["work ends in time", "work is left"])
def test_a_leaving_actor_stops_only_without_work(in_time):
    """An engine ends its requests when it stops, and an episode would take that for its end."""

    async def watch(slot):
        loop = asyncio.get_running_loop()

        async def finish(_slot):
            if not in_time:
                await loop.create_future()

        slot.leave("its node is removed", by=loop.time() + (600 if in_time else 0))
        await watch_with_pings(slot, loop.create_future(), RayConfig(), finish)

    slot = ActorSlot("replica", 0, handle=Handle())
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(watch(slot))
    assert "EngineError: its node is removed" == failure_reason(raised.value)
    assert in_time == ("stop" in slot.handle.called)
