"""Log lines of a group reward in the process of the driver."""

import asyncio
from types import SimpleNamespace

import structlog
from structlog.testing import capture_logs

from turnwise.events.dispatch import Observers
from turnwise.options import GroupOptions
from turnwise.record.result import EpisodeResult
from turnwise.runtime.groups import GroupScoring
from turnwise.types import Status, Task


def test_log_lines_of_a_group_reward_name_its_episodes():
    """They have the keys of the group, and later lines have none."""

    async def score_group(episodes):
        structlog.get_logger().info("scored")
        return [1.0] * len(episodes)

    episodes = [EpisodeResult(task=Task(messages=(), uid="t"), status=Status.COMPLETED, key=key) for key in "ab"]
    reward = SimpleNamespace(score_group=score_group)
    scoring = GroupScoring(reward, "group reward", GroupOptions(), Observers(), 1.0)
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        assert asyncio.run(scoring._ask(episodes, 10.0)) == [1.0, 1.0]
        structlog.get_logger().info("after")

    assert [line.get("keys") for line in lines] == [["a", "b"], None]
