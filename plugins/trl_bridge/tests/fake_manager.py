"""Episodes that tests give, and a manager that answers with them."""

import copy

import numpy as np

from turnwise import EpisodeResult, SamplingParams, Status, Task, Trajectory
from turnwise.batch import collate
from turnwise.testing.tokenizers import byte_tokenizer
from turnwise.types import TrajectoryScore


def make_task(uid, text="Question?"):
    """Return a task."""
    return Task(messages=({"role": "user", "content": text},), uid=uid)


def make_result(task, trajectory=None, reward=None, status=Status.COMPLETED):
    """Return an episode of one trajectory, or of none."""
    return EpisodeResult(
        task=task,
        status=status,
        trajectories=() if trajectory is None else (trajectory,),
        scores=() if reward is None else (TrajectoryScore(value=reward),),
        messages=(*task.messages, {"role": "assistant", "content": "…"}),
    )


def make_trajectory(prompt=(5, 6, 7), answer=(8, 9), logprobs=None, version=0):
    """Return a record of one turn, an observation and a second turn."""
    trajectory = Trajectory(np.asarray(prompt, np.int32))
    logprobs = logprobs or [-0.5] * len(answer)
    trajectory.add_action(np.asarray(answer, np.int32), np.asarray(logprobs, np.float32), version)
    trajectory.add_observation(np.asarray([3, 4], np.int32))
    trajectory.add_action(np.asarray([2], np.int32), np.asarray([-0.25], np.float32), version + 1)
    return trajectory


class GivenManager:
    """Stands for a `RolloutManager` whose episodes a function makes; it counts its weight versions."""

    def __init__(self, episode_of):
        self.episode_of = episode_of
        self.weight_version = 0
        self.chat = GivenChat()
        self.plan = copy.copy(GivenPlan())
        self.weights = {}
        self.aborted = False

    def rollout(self, tasks, *, global_step=0, validation=False):
        """Return an episode for each task."""
        return [self.episode_of(task, number) for number, task in enumerate(tasks)]

    def collate(self, results):
        """Return their batch."""
        return collate(results, pad_token_id=0)

    def update_weights(self, weights, *, version=None):
        """Take them."""
        self.weights = dict(weights)
        self.weight_version += 1

    def abort(self):
        """Note it."""
        self.aborted = True


class GivenPlan:
    """The part of a plan that the bridge reads."""

    sampling = SamplingParams()


class GivenChat:
    """The part of a chat template that the bridge uses."""

    tokenizer = byte_tokenizer()

    def prompt(self, messages):
        """Return some ids."""
        return np.asarray([1, 2], np.int32)
