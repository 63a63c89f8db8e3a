"""A router that fails, or chooses a replica that cannot run the request. Without Ray."""

import asyncio
from types import SimpleNamespace

import pytest

from turnwise.errors import BoundaryError, EngineError, boundary
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.runtime.remote.replica_pool import ReplicaPool
from turnwise.types import Capabilities, GenerateRequest, SamplingParams

REQUEST = GenerateRequest(request_id="r", trajectory_id="t", token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=1))


class Listener(Observer):
    """Hears the choices, so that the pool asks the router for its reason."""

    def on_request_routed(self, event):
        raise AssertionError(f"the choice {event} must not be announced")


class Fixed:
    """Chooses one index, or raises an error."""

    def __init__(self, answer):
        self.answer = answer

    def choose(self, request, replicas):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def release(self, trajectory_id):
        pass


class Explained(Fixed):
    """Has a reason for its choices."""

    def decide(self, request, replicas):
        return SimpleNamespace(index=self.choose(request, replicas), reason="mine")


def generate(router, *observers):
    """Ask a pool with one live replica, number 0, and a dead one."""

    async def run():
        pool = ReplicaPool(router, Capabilities(), 2)
        pool.observe(Observers.of(observers), "worker")
        pool.replica_up(0, lambda message: None)
        async with asyncio.timeout(10):
            await pool.generate(REQUEST)

    asyncio.run(run())


@pytest.mark.parametrize("observers", [(), (Listener(),)])
@pytest.mark.parametrize("router", [Fixed, Explained])
@pytest.mark.parametrize("answer", [99, -1, 1, None, "0", ValueError("no table")])
def test_the_error_names_the_router(answer, router, observers):
    """Also for a dead replica, which would never answer; only the router is blamed."""
    named = f"router {router.__name__} of {__name__}: "
    with pytest.raises(BoundaryError, match=named) as blamed, boundary("engine", "engine"):
        generate(router(answer), *observers)

    assert blamed.value.owner == "infra"


def test_an_engine_error_of_a_router_stays_one():
    """A router that finds no replica says so in the words of engines."""
    with pytest.raises(EngineError, match="all are draining"):
        generate(Fixed(EngineError("all are draining")))
