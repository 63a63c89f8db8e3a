"""The answers that a reward worker accepts, without Ray."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.runtime.ray.reward_actor import RewardActor
from turnwise.runtime.remote.result_wire import pack_episodes


def ask(answer):
    """Return the replies of a reward, and of a group reward, that give this answer."""

    async def replies():
        reward = SimpleNamespace(score=lambda episode: answer, score_group=lambda episodes: answer)
        blueprint = SimpleNamespace(
            make_router=None, make_reward=lambda judge: reward, make_group_reward=lambda judge: reward
        )
        actor = RewardActor("rewards", blueprint, {}, scores_groups=True)
        snapshot = SimpleNamespace(as_episode=lambda: None, recorded=())
        return await actor.score(snapshot, 10.0), await actor.score_group(pack_episodes([]), 10.0)

    return asyncio.run(replies())


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.int64(1), True, 1, 0.5])
def test_every_real_number_is_a_score(number):
    """Numbers of NumPy are what most rewards compute."""
    assert [(reply.failure, reply.scores) for reply in ask(number)] == [(None, number)] * 2


def test_an_array_has_a_score_for_each_episode():
    """A group reward may return an array, as it may without reward workers."""
    _single, group = ask(np.asarray([0.5, 1.5], np.float32))
    assert group.failure is None
    assert group.scores.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("answer", ["0.5", None, [None], 1j])
def test_anything_else_is_refused(answer):
    """The text names the value."""
    for reply in ask(answer):
        assert "expected a TrajectoryScore" in reply.failure.text
