"""Every estimator sees the whole reward of each episode, on any record and after each change of the rewards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from made_batches import advantages_of

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.layout import Objective
from turnwise.record.lineage import RecordLineage
from turnwise_grpo_trainer.config import AlgorithmConfig, OverlongConfig
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.reward_shaping import punish_overlong, shuffle_rewards
from turnwise_grpo_trainer.objective.timeline import Timeline
from turnwise_rollout_buffer import LateScores, TrajectoryBuffer

CASES = ("one record", "untrained last", "silent last", "no tokens last", "forced first", "exact", "expanded", "mixed")
SHAPES = ("none", "overlong", "shuffled")
GROUP = 4
CACHE = 6


def conversation(rng):
    """Return a record of two turns, each followed by an observation."""
    record = Trajectory(rng.integers(0, 40, 3))
    for _ in range(2):
        sample(record, rng, int(rng.integers(2, 7)))
        record.add_observation(rng.integers(0, 40, 2))
    return record


def parallel(rng):
    """Return a record with a block of three parallel paths, and a summary after it."""
    record = Trajectory(rng.integers(0, 40, 4))
    sample(record, rng, 2)
    paths = record.fork(3)
    for path in paths:
        sample(path, rng, int(rng.integers(2, 5)))
    record.join(paths)
    sample(record, rng, 3)
    return record


def sample(record, rng, num):
    """Add a turn of some tokens."""
    record.add_action(rng.integers(0, 40, num), -rng.random(num).astype(np.float32))


def silent(rng):
    """Return a record with an observation and no sampled token."""
    record = Trajectory(rng.integers(0, 40, 3))
    record.add_observation(rng.integers(0, 40, 2))
    return record


def make_records(case, rng):
    """Return the records of an episode, and their lineage."""
    first, none = conversation(rng), Trajectory(rng.integers(0, 40, 3))
    if case == "untrained last":
        return (first, conversation(rng)), (RecordLineage(), RecordLineage(kind="aside", trained=False, parent=0))
    records = {
        "one record": (first,),
        "silent last": (first, silent(rng)),
        "no tokens last": (first, none),
        "forced first": (silent(rng), first),
        "exact": (parallel(rng),),
        "expanded": (parallel(rng),),
        "mixed": (conversation(rng), parallel(rng), conversation(rng)),
    }
    return records[case], ()


def make_episodes(case, rewards, *, late):
    """Return a group; the score lies on the first record alone, or it comes late."""
    rng, episodes = np.random.default_rng(len(case)), []
    objective = Objective.EXPANDED if case in ("expanded", "mixed") else Objective.EXACT
    for number, reward in enumerate(rewards):
        records, lineage = make_records(case, rng)
        for record in records:
            record.close()
        on = len(records) - 1 if number % 2 else 0
        scores = tuple(TrajectoryScore(value=reward * (index == on)) for index in range(len(records)))
        episodes.append(
            EpisodeResult(
                task=Task(messages=({"role": "user", "content": "?"},), uid="a"),
                rollout_n=number,
                status=Status.COMPLETED,
                trajectories=records,
                scores=() if late else scores,
                objective=objective,
                lineage=lineage,
            )
        )
    if not late:
        return episodes
    buffer = TrajectoryBuffer(len(rewards), 2, late_scores=LateScores(timeout_s=1e9))
    buffer.put_batch(episodes)
    for number, reward in enumerate(rewards):
        buffer.notify_score("a", number, reward)
    return list(buffer.take(1)[0].episodes)


@frozen
class Seen:
    """A registered estimator that returns the rewards of tokens as they come."""

    def estimate(self, *, token_rewards, **_more):
        return token_rewards


def lines_of(batch):
    """Return the line of each row."""
    return Timeline.from_batch(batch).line_of


def line_totals(batch):
    """Return the reward of each line as the estimators with time steps see it: its undiscounted sum."""
    config = AlgorithmConfig(adv_estimator="gae", norm_adv=False, lam=1.0)
    mask = compute_loss_mask(batch)
    found = advantages_of(batch, config, mask=mask, values=torch.zeros_like(batch.rm_scores)).values
    totals = {}
    for line, values, row_mask in zip(lines_of(batch).tolist(), found, mask.bool(), strict=True):
        if row_mask.any() and line not in totals:
            totals[line] = values[row_mask][0].item()  # the return of its first action
    return totals


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
@given(rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=GROUP, max_size=GROUP), late=st.booleans())
@settings(max_examples=6)
def test_the_reward_that_an_estimator_sees(case, shape, rewards, late):
    """Each line has the episode's reward; the punishment of a row adds to its line, and the largest to the episode."""
    batch = collate(make_episodes(case, rewards, late=late), pad_token_id=0)
    episodes, owned = batch.episode_index.tolist(), dict(enumerate(rewards))
    added = [0.0] * len(batch)
    if shape == "shuffled":
        batch = shuffle_rewards(batch, seed=3)
        owned = {episode: batch.episode_rewards[row].item() for row, episode in enumerate(episodes)}
        assert sorted(rewards) == sorted(owned.values())
    elif shape == "overlong":
        limit = int(batch.response_lens.max())
        batch, _ = punish_overlong(batch, OverlongConfig(cache_length=CACHE, max_length=limit, factor=0.5), 64)
        excess = (batch.response_lens - (limit - CACHE)).clamp(0, CACHE) / CACHE
        added = (-0.5 * excess).tolist()

    lines = lines_of(batch).tolist()
    for line, total in line_totals(batch).items():
        rows = [row for row in range(len(batch)) if lines[row] == line]
        assert owned[episodes[rows[0]]] + min(added[row] for row in rows) == pytest.approx(total, abs=1e-5)
    expected = [
        owned[episode] + min(added[row] for row in range(len(batch)) if episodes[row] == episode)
        for episode in episodes
    ]
    assert expected == pytest.approx(batch.episode_rewards.tolist())
    _check_outcome_estimators(batch, expected)
    _check_tokens(batch)


def _check_outcome_estimators(batch, expected):
    """The estimators of one advantage for each episode depend on the episode's reward alone."""
    mask, episodes = compute_loss_mask(batch), batch.episode_index.tolist()
    rewards = dict(zip(episodes, expected, strict=True))
    mean = sum(rewards.values()) / GROUP
    std = (sum((each - mean) ** 2 for each in rewards.values()) / (GROUP - 1)) ** 0.5
    scales = {"dr_grpo": 1.0, "rloo": GROUP / (GROUP - 1), "grpo": 1 / (std + 1e-6)}
    for name, scale in scales.items():
        found = advantages_of(batch, AlgorithmConfig(adv_estimator=name), mask=mask).values
        for row, episode in enumerate(episodes):
            wanted = (rewards[episode] - mean) * scale
            assert [wanted] * int(mask[row].sum()) == pytest.approx(found[row][mask[row].bool()].tolist(), abs=1e-4)


def _check_tokens(batch):
    """A registered estimator gets the same rewards of tokens, and REINFORCE++ normalises the returns of the lines."""
    mask = compute_loss_mask(batch)
    found = advantages_of(batch, AlgorithmConfig(), mask=mask, estimator=Seen()).values
    lines = torch.zeros(len(batch)).index_add(0, lines_of(batch), found.sum(1)).tolist()
    totals = line_totals(batch)
    assert {line: lines[line] for line in totals} == pytest.approx(totals, abs=1e-5)
    returns = AlgorithmConfig(adv_estimator="gae", norm_adv=True, lam=1.0)
    values = torch.zeros_like(batch.rm_scores)
    whitened = advantages_of(batch, returns, mask=mask, values=values).values
    plus = advantages_of(batch, AlgorithmConfig(adv_estimator="reinforce_plus_plus"), mask=mask).values
    torch.testing.assert_close(plus, whitened)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_the_row_that_is_too_long_is_punished(estimator):
    """If each row is a line, only a row that is too long loses advantage, and not the last row."""
    batch = collate(make_episodes("expanded", [1.0, 1.0], late=False), pad_token_id=0)
    long = batch.response_lens == int(batch.response_lens.max())
    config = OverlongConfig(cache_length=1, max_length=int(batch.response_lens.max()))
    punished, _ = punish_overlong(batch, config, 64)

    config = AlgorithmConfig(adv_estimator=estimator, gamma=1.0, lam=1.0)
    mask, values = compute_loss_mask(batch), torch.zeros_like(batch.rm_scores)
    found = advantages_of(punished, config, mask=mask, values=values).values
    firsts = torch.stack([row[row_mask.bool()][0] for row, row_mask in zip(found, mask, strict=True)])
    assert firsts[long].max() < firsts[~long].min()
    assert 1 == len(set(firsts[~long].tolist()))
