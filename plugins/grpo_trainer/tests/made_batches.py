"""Hand-made records, and batches of them."""

from __future__ import annotations

import numpy as np

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise_grpo_trainer.objective.advantages import estimate_advantages
from turnwise_grpo_trainer.objective.estimators import OWN_ESTIMATORS

VOCABULARY = 40


def ids(rng, num):
    """Return random token ids."""
    return rng.integers(0, VOCABULARY, num)


def logprobs(rng, num):
    """Return random log-probabilities."""
    return -rng.random(num).astype(np.float32)


def conversation(rng):
    """Return a record of two turns, each followed by an observation."""
    record = Trajectory(ids(rng, int(rng.integers(2, 6))))
    for _ in range(2):
        num = int(rng.integers(2, 7))
        record.add_action(ids(rng, num), logprobs(rng, num))
        record.add_observation(ids(rng, int(rng.integers(1, 4))))
    return record


def parallel(rng):
    """Return a record with a block of three parallel paths, and a summary after it."""
    record = Trajectory(ids(rng, 4))
    record.add_action(ids(rng, 2), logprobs(rng, 2))
    paths = record.fork(3)
    for path in paths:
        num = int(rng.integers(2, 5))
        path.add_action(ids(rng, num), logprobs(rng, num))
    record.join(paths)
    record.add_forced(ids(rng, 1))
    record.add_action(ids(rng, 3), logprobs(rng, 3))
    return record


def sample_group(rng, prompt, num):
    """Return answers to one prompt, the last two of which begin with the same turn, and one record with paths."""
    records = []
    for _ in range(num - 2):
        record = Trajectory(prompt)
        for _ in range(2):
            size = int(rng.integers(2, 7))
            record.add_action(ids(rng, size), logprobs(rng, size))
            record.add_observation(ids(rng, int(rng.integers(1, 4))))
        records.append(record)
    branch = records[-1].branched(records[-1].mark())
    branch.add_action(ids(rng, 3), logprobs(rng, 3))
    thinking = Trajectory(prompt)
    paths = thinking.fork(2)
    for path in paths:
        path.add_action(ids(rng, 3), logprobs(rng, 3))
    thinking.join(paths)
    thinking.add_action(ids(rng, 2), logprobs(rng, 2))
    return [*records, branch, thinking]


def make_result(record, *, uid="a", rollout_n=0, reward=0.0, status=Status.COMPLETED):
    """Return an episode with one record."""
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid=uid),
        rollout_n=rollout_n,
        status=status,
        trajectories=(record,),
        scores=(TrajectoryScore(value=reward),),
    )


def make_batch(records, rewards=None, *, group_size=4):
    """Return a batch of groups."""
    rewards = [float(number % 3) for number in range(len(records))] if rewards is None else rewards
    return collate(
        [
            make_result(record, uid=f"t{number // group_size}", rollout_n=number % group_size, reward=reward)
            for number, (record, reward) in enumerate(zip(records, rewards, strict=True))
        ],
        pad_token_id=0,
    )


def advantages_of(batch, config, *, estimator=None, **inputs):
    """Return the advantages of a batch by the estimator that the config names, or by another one."""
    chosen = estimator or OWN_ESTIMATORS[config.adv_estimator.name]
    return estimate_advantages(batch, config, chosen, **inputs)
