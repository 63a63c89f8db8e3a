"""The buffer between rollout and trainer: groups of episodes, the tasks that they come from, and a producer of them."""

from __future__ import annotations

from turnwise_rollout_buffer.buffer import BufferClosedError, TrajectoryBuffer
from turnwise_rollout_buffer.group_reward import GroupReward, GroupRewardConfig
from turnwise_rollout_buffer.groups import EpisodeGroup
from turnwise_rollout_buffer.late_scores import LateScores
from turnwise_rollout_buffer.producer import GroupProducer
from turnwise_rollout_buffer.task_stream import Share, TaskStream

__all__ = [
    "BufferClosedError",
    "EpisodeGroup",
    "GroupProducer",
    "GroupReward",
    "GroupRewardConfig",
    "LateScores",
    "Share",
    "TaskStream",
    "TrajectoryBuffer",
]
