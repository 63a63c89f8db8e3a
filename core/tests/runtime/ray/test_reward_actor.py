"""The answers that a reward worker accepts, without Ray."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
import torch
from structlog.testing import capture_logs

from turnwise.record.result import EpisodeResult
from turnwise.runtime.ray.reward_actor import RewardActor
from turnwise.runtime.remote.result_wire import pack_episodes
from turnwise.types import Status, Task, TrajectoryScore


class Logged:
    """A number that logs a line when it is asked for."""

    def __init__(self, is_async):
        self.is_async = is_async

    def score(self, _episode):
        structlog.get_logger().info("scored")
        return self._answer() if self.is_async else 1.0

    score_group = score

    async def _answer(self):
        structlog.get_logger().info("scored")
        return 1.0


@pytest.mark.parametrize("is_async", [False, True])
def test_log_lines_of_a_reward_name_their_episode(is_async):
    """Uid and key of the episode, or the keys of the group; the thread of a synchronous reward has them, too."""
    episodes = [EpisodeResult(task=Task(messages=(), uid="t"), status=Status.COMPLETED, key=key) for key in "ab"]
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        assert [reply.failure for reply in ask_rewards(Logged(is_async), episodes)] == [None] * 2

    names = [{name: line[name] for name in line.keys() & {"episode", "key", "keys"}} for line in lines]
    one, group = {"episode": "t/0", "key": "k"}, {"keys": ["a", "b"]}
    assert names == ([one, one, group, group] if is_async else [one, group])


def ask(answer):
    """Return the replies of a reward, and of a group reward, that give this answer."""
    return ask_rewards(SimpleNamespace(score=lambda episode: answer, score_group=lambda episodes: answer), [])


def ask_rewards(reward, episodes):
    """Return the replies of a reward worker to an episode and to a group."""

    async def replies():
        blueprint = SimpleNamespace(
            make_router=None, make_reward=lambda judge: reward, make_group_reward=lambda judge: reward
        )
        actor = RewardActor("rewards", blueprint, {}, scores_groups=True)
        snapshot = SimpleNamespace(as_episode=lambda: None, recorded=(), reports=(), uid="t/0", key="k")
        return await actor.score(snapshot, 10.0), await actor.score_group(
            pack_episodes(list(enumerate(episodes))), 10.0
        )

    return asyncio.run(replies())


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), np.int64(1), True, 1, 0.5, np.array(0.5), torch.tensor(0.5)]
)
def test_every_real_number_is_a_score(number):
    """Rewards compute with NumPy and torch; an array without dimensions is a number."""
    assert [(reply.failure, reply.scores) for reply in ask(number)] == [(None, TrajectoryScore(value=number))] * 2


def test_an_array_has_a_score_for_each_episode():
    """A group reward may return an array, as it may without reward workers."""
    _single, group = ask(np.asarray([0.5, 1.5], np.float32))
    assert group.failure is None
    assert [score.value for score in group.scores] == [0.5, 1.5]


@pytest.mark.parametrize("answer", ["0.5", None, [None], 1j])
def test_anything_else_is_refused(answer):
    """The text names the value."""
    for reply in ask(answer):
        assert "expected a number, TrajectoryScore" in reply.failure.text
