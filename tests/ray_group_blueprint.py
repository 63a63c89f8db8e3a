"""A blueprint of a group reward for the tests on Ray; every actor imports it."""

import os
import time

from attrs import frozen
from ray_judge_blueprint import JudgedBlueprint, once

from turnwise.errors import InfrastructureError
from turnwise_rollout_buffer import GroupReward, GroupRewardConfig


class GroupSums(GroupReward):
    """The ids of each episode relative to its group; the uid of a task may ask for a fault."""

    def __init__(self, folder="", deadline_s=30.0):
        super().__init__(GroupRewardConfig(deadline_s=deadline_s))
        self.folder = folder

    def score_group(self, episodes):
        uid = episodes[0].task.uid
        if uid.startswith("group-kills-once") and once(self.folder, uid):
            os._exit(1)
        if uid.startswith("group-fails-once") and once(self.folder, uid):
            raise InfrastructureError("the service is down")
        if uid.startswith("group-raises"):
            raise KeyError("answer")
        if uid.startswith("group-blocks"):
            time.sleep(1000)
        sums = [float(each.trajectories[0].input_ids.sum() % 97) for each in episodes]
        return [value - min(sums) + each.reward for value, each in zip(sums, episodes, strict=True)]


@frozen
class GroupBlueprint(JudgedBlueprint):
    """Scripted engines, a reward without a judge, and a group reward."""

    judged: bool = False
    group_s: float = 600.0

    def make_group_reward(self, _judge=None):
        return GroupSums(self.folder, self.group_s)
