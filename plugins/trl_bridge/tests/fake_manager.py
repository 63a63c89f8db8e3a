"""A fake rollout manager and the episodes that it returns."""

import copy

import numpy as np

from turnwise import EpisodeResult, SamplingParams, Status, Task, Trajectory
from turnwise.batch.rollout_batch import collate
from turnwise.types import TrajectoryScore
from turnwise_testing.inputs.tokenizers import byte_tokenizer


def make_task(uid, text="Question?"):
    """Return a task."""
    return Task(messages=({"role": "user", "content": text},), uid=uid)


def make_result(task, trajectory=None, reward=None, status=Status.COMPLETED):
    """Return an episode with one trajectory or none."""
    return EpisodeResult(
        task=task,
        status=status,
        trajectories=() if trajectory is None else (trajectory,),
        scores=() if reward is None else (TrajectoryScore(value=reward),),
        messages=(*task.messages, {"role": "assistant", "content": "…"}),
    )


def make_trajectory(prompt=(5, 6, 7), answer=(8, 9), logprobs=None, version=0):
    """Return a trajectory with a turn, an observation and a second turn."""
    trajectory = Trajectory(np.asarray(prompt, np.int32))
    logprobs = logprobs or [-0.5] * len(answer)
    trajectory.add_action(np.asarray(answer, np.int32), np.asarray(logprobs, np.float32), version)
    trajectory.add_observation(np.asarray([3, 4], np.int32))
    trajectory.add_action(np.asarray([2], np.int32), np.asarray([-0.25], np.float32), version + 1)
    return trajectory


class FakeManager:
    """A fake `RolloutManager`: a function builds its episodes, and it counts weight updates."""

    def __init__(self, build_result):
        self.build_result = build_result
        self.weight_version = 0
        self.chat = FakeChat()
        self.plan = copy.copy(FakePlan())
        self.weights = {}
        self.aborted = False

    def rollout(self, tasks, *, global_step=0, validation=False):
        """Return one episode per task."""
        return [self.build_result(task, number) for number, task in enumerate(tasks)]

    def collate(self, results):
        """Return the batch of the episodes."""
        return collate(results, pad_token_id=0)

    def update_weights(self, weights, *, version=None):
        """Keep the weights and count the update."""
        self.weights = dict(weights)
        self.weight_version += 1

    def abort(self):
        """Record the abort."""
        self.aborted = True


class FakePlan:
    """The part of a plan that the bridge uses."""

    sampling = SamplingParams()


class FakeChat:
    """The part of a chat template that the bridge uses."""

    tokenizer = byte_tokenizer()

    def prompt(self, messages):
        """Return two ids."""
        return np.asarray([1, 2], np.int32)
