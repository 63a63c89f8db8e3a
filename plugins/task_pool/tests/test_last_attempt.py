"""The result of an episode belongs to one of its attempts, whose records alone are trained. Without a pool."""

import asyncio
from types import SimpleNamespace

import pytest

from turnwise_task_pool import agent as pull_agent
from turnwise_task_pool.agent import PoolAgent
from turnwise_task_pool.config import PoolConfig
from turnwise_task_pool.workers import attempts as pool_attempts
from turnwise_task_pool.workers.attempts import Offer


class Attempt:
    """An attempt whose lease has ended; it notes whether its records are trained."""

    def __init__(self, fence):
        self.session, self.is_trained = None, None
        self.lease = SimpleNamespace(fence=fence)

    async def wait(self):
        pass

    def close(self, *, is_trained):
        self.is_trained = is_trained


@pytest.fixture
def wait(monkeypatch):
    """Return a function that waits for the last attempt of an episode, when the result is of the lease with a fence."""

    async def wait_for_agent(agent, _session, _limits):
        await agent

    monkeypatch.setattr(pull_agent, "wait_for_agent", wait_for_agent)

    def run(attempts, fence):
        async def main():
            queue = asyncio.Queue()
            for attempt in attempts:
                queue.put_nowait(attempt)

            async def result(_attempt):
                return SimpleNamespace(fence=fence)

            episode = SimpleNamespace(record_metric=lambda _name, _value: None)
            offer = SimpleNamespace(attempts=queue, next_attempt=queue.get, result=result, episode=episode)
            agent = SimpleNamespace(config=PoolConfig(control_file="unused", score_s=1.0))
            return await PoolAgent._wait(agent, offer)

        return asyncio.run(main())[1]

    return run


def test_a_later_attempt_has_ended_too(wait):
    """The first one lost its lease, and the second ended before anybody looked: only the second is trained."""
    attempts = [Attempt(1), Attempt(2)]

    assert attempts[1] is wait(attempts, fence=2)
    assert [False, True] == [each.is_trained for each in attempts]


def test_the_result_of_the_only_attempt(wait):
    """It is trained."""
    attempts = [Attempt(1)]

    assert attempts[0] is wait(attempts, fence=1)
    assert attempts[0].is_trained


def test_a_later_lease_without_a_session(wait):
    """Its agent died before it had one, and the episode has ended: nobody waits for it, and nothing is trained."""
    attempts = [Attempt(1)]

    assert attempts[0] is wait(attempts, fence=2)
    assert attempts[0].is_trained is False


def test_an_attempt_that_nobody_has_looked_at_ends_with_the_episode(monkeypatch):
    """It is closed, and its records are not trained."""
    offer = Offer(None, None, None, None, None, None, None)
    attempt = Attempt(1)
    monkeypatch.setattr(pool_attempts, "LeasedSession", Attempt)
    offer.attempts.put_nowait(attempt)

    offer.close()

    assert attempt.is_trained is False
