"""The files of training steps: complete episodes, each token with the advantage that it was trained with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.record.lineage import RecordLineage
from turnwise_grpo_trainer.config import PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.processes.trainers import LocalTrainer
from turnwise_grpo_trainer.report.episode_log import EpisodeLog, split_advantages
from turnwise_result_files import read_results, read_training_step
from turnwise_testing.inputs.strategies import trajectories


def make_record(size=3):
    """Return a record of two turns with an observation between them."""
    record = Trajectory([1, 2])
    record.add_action([3] * size, [-0.5] * size)
    record.add_observation([4, 5])
    record.add_action([6], [-0.5])
    return record


def make_result(*records, number=0, uid="t", reward=0.0, **options):
    """Return an episode."""
    options = {"status": Status.COMPLETED, "scores": [TrajectoryScore(value=reward)] * len(records)} | options
    task = Task(messages=({"role": "user", "content": "?"},), uid=uid)
    return EpisodeResult(task=task, rollout_n=number, trajectories=records, **options)


def to_batch(episodes):
    """Return the batch of episodes."""
    return collate(episodes, pad_token_id=0)


@settings(max_examples=40)
@given(data=st.data(), objective=st.sampled_from(["exact", "expanded"]))
def test_each_token_gets_its_own_value(data, objective):
    """
    Every sampled token of a trained record has the value of the row that trains it, all other tokens have 0.

    The values are the tokens' ids, so a wrong place shows. Rows of expanded paths repeat tokens as context.
    """
    episodes = []
    for number in range(data.draw(st.integers(1, 4))):
        records = data.draw(st.lists(trajectories(max_steps=4), max_size=2))
        lineage = [RecordLineage(trained=data.draw(st.booleans())) for _ in records]
        episodes.append(make_result(*records, uid=f"t{number}", lineage=lineage, objective=objective))
    batch = to_batch(episodes)
    values = (batch.responses * batch.response_mask).float().numpy()

    columns = split_advantages(episodes, values, to_batch)

    for episode, found in zip(episodes, columns, strict=True):
        for record, trained, each in zip(episode.trajectories, episode.trained, found, strict=True):
            expected = (record.response_ids * record.response_mask).tolist()
            assert (expected if trained else None) == (None if each is None else each.tolist())


def test_the_advantages_of_an_update(spec, tmp_path):
    """The file has the group's advantages on sampled tokens; an episode that failed has none."""
    episodes = [make_result(make_record(number + 1), number=number, reward=float(number)) for number in range(3)]
    episodes.append(make_result(make_record(), number=3, reward=9.0, status=Status.FAILED))
    config = TrainConfig(policy=PolicyConfig(device="cpu"))
    learner = Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))
    trainer = LocalTrainer(learner, spec.path)
    with pytest.raises(RuntimeError, match="no batch"):
        trainer.advantages()
    trainer.update(to_batch(episodes), step=1, version=0)

    log = EpisodeLog(tmp_path, decode=lambda ids: " ".join(map(str, ids)))
    file = log.write(5, episodes, split_advantages(episodes, trainer.advantages(), to_batch))

    trained = read_training_step(file)
    assert [5] * 4 == [each.step for each in trained]
    for each, expected in zip(trained, (-1.0, 0.0, 1.0, 0.0), strict=True):
        mask = each.result.trajectories[0].response_mask
        np.testing.assert_allclose(mask * expected, each.advantages[0], atol=1e-5)


@pytest.mark.parametrize(("from_step", "left"), [(None, []), (2, [1, 2])])
def test_files_of_later_steps_are_removed(tmp_path, from_step, left):
    """A new training removes all files of the old one, a resumed one only files that it writes again."""
    log = EpisodeLog(tmp_path)
    log.start(from_step=None)
    for step in (1, 2, 3):
        log.write(step, [make_result(make_record())], [[None]])
        log.write_validation(step, [make_result(make_record())])
    (log.folder / "step-00000002.parquet.partial").touch()
    (log.folder / "notes.md").touch()

    log.start(from_step=from_step)

    kept = [f"{kind}-{step:08d}.parquet" for kind in ("step", "validation") for step in left]
    assert ["notes.md", *kept] == sorted(f.name for f in log.folder.iterdir())


@pytest.mark.parametrize("every", [0, 5])
def test_held_out_episodes_are_kept(tmp_path, every):
    """Each validation has a file that `turnwise show` reads, whatever the steps between files; none with 0."""
    log = EpisodeLog(tmp_path, every=every)
    log.write_validation(2, [make_result(make_record(), reward=0.5)])

    file = log.folder / "validation-00000002.parquet"
    assert ([0.5] if every else None) == ([each.reward for each in read_results(file)] if file.exists() else None)


def test_the_steps_that_are_written():
    """Every so many steps, from the first; none with 0."""
    due = {every: [step for step in range(1, 8) if EpisodeLog(None, every).is_due(step)] for every in (0, 1, 3)}

    assert {0: [], 1: [1, 2, 3, 4, 5, 6, 7], 3: [1, 4, 7]} == due
