"""
The buffer between rollout and trainer: groups of episodes, the tasks that they come from, and a producer of them.

Names are imported when they are asked for: the config of a group reward needs no runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from turnwise_rollout_buffer.buffer import BufferClosedError, TrajectoryBuffer
    from turnwise_rollout_buffer.config import GroupRewardConfig
    from turnwise_rollout_buffer.group_reward import GroupReward
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

_MODULES: Final = {
    "BufferClosedError": "buffer",
    "EpisodeGroup": "groups",
    "GroupProducer": "producer",
    "GroupReward": "group_reward",
    "GroupRewardConfig": "config",
    "LateScores": "late_scores",
    "Share": "task_stream",
    "TaskStream": "task_stream",
    "TrajectoryBuffer": "buffer",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
