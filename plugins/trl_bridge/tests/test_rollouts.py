"""Episodes as rows for TRL: exactly the sampled tokens, and one row per prompt."""

import numpy as np
import pytest
from attrs import evolve
from fake_manager import FakeManager, make_result, make_task, make_trajectory

from turnwise import Status, Trajectory, TrajectoryScore, load_config
from turnwise.errors import ConfigError, DataError
from turnwise.layout import Objective
from turnwise.record.lineage import RecordLineage
from turnwise_trl_bridge import Rollouts, build_dataset
from turnwise_trl_bridge.rollouts import REWARD, UID, turnwise_reward


def make_rollouts(*results):
    """Return rollouts with the given results, and their uids."""
    tasks = {result.task.uid: result.task for result in results}
    by_uid = {result.task.uid: result for result in results}
    return Rollouts(FakeManager(lambda task, _number: by_uid[task.uid]), tasks), list(by_uid)


def test_a_row_equals_the_record():
    """A row has the sampled ids, mask and log-probabilities without padding, also beside a longer row."""
    short = make_result(make_task("a"), make_trajectory(prompt=(5,), answer=(8,)), reward=1.0)
    long = make_result(make_task("b"), make_trajectory(prompt=(5, 6, 7), answer=(8, 9, 10)), reward=0.5)
    rollouts, uids = make_rollouts(short, long)
    rows = rollouts.run(uids, global_step=3)
    assert rows["prompt_ids"] == [[5], [5, 6, 7]]
    assert rows["completion_ids"] == [[8, 3, 4, 2], [8, 9, 10, 3, 4, 2]]
    assert rows["env_mask"] == [[1, 0, 0, 1], [1, 1, 1, 0, 0, 1]]
    assert rows["logprobs"] == [[-0.5, 0, 0, -0.25], [-0.5, -0.5, -0.5, 0, 0, -0.25]]
    assert rows[REWARD] == [1.0, 0.5]
    assert rows["position_ids"] == [[0, 1, 2, 3, 4], list(range(9))]


def test_a_fork_keeps_its_layout():
    """Block and path starts equal the record's, also if the batch was padded on the left."""
    record = make_trajectory(prompt=(5, 6))
    paths = record.fork(2)
    for path, ids in zip(paths, ((10, 11), (12,)), strict=True):
        path.add_action(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), 0)
    record.join(paths)
    wide = make_result(make_task("b"), make_trajectory(prompt=range(20, 40)), reward=0.0)
    rollouts, uids = make_rollouts(make_result(make_task("a"), record, reward=1.0), wide)
    rows = rollouts.run(uids, global_step=0)
    assert rows["block_start"][0] == record.block_start.tolist()
    assert rows["path_start"][0] == record.path_start.tolist()
    assert rows["position_ids"][0] == record.position_ids.tolist()


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
def test_an_episode_without_a_record_has_a_row_that_trains_nothing(status):
    """A row without a record has the prompt, one token outside the loss and no reward, so TRL gets every row."""
    empty = make_result(make_task("a"), status=status)
    rollouts, uids = make_rollouts(empty, make_result(make_task("b"), make_trajectory(), reward=1.0))
    rows = rollouts.run(uids, global_step=0)
    end = rollouts.manager.chat.tokenizer.eos_token_id
    assert (rows["prompt_ids"][0], rows["completion_ids"][0], rows["env_mask"][0]) == ([1, 2], [end], [0])
    assert rows[REWARD] == [None, 1.0]


def test_score_of_an_episode_without_response():
    """An episode that was scored before its first token keeps its reward: it counts in the baseline of its group."""
    silent = make_result(make_task("a"), Trajectory([1, 2]), status=Status.TRUNCATED, reward=-1.0)
    rollouts, uids = make_rollouts(silent)
    rows = rollouts.run(uids, global_step=0)
    assert (rows["env_mask"], rows[REWARD]) == ([[0]], [-1.0])


def test_expanded_paths_are_rejected():
    """An engine without layouts makes several rows of an episode with paths; TRL would give them to other prompts."""
    record = make_trajectory(prompt=(5, 6))
    paths = record.fork(2)
    for path in paths:
        path.add_action(np.asarray([7], np.int32), np.zeros(1, np.float32), 0)
    record.join(paths)
    result = evolve(make_result(make_task("a"), record, reward=1.0), objective=Objective.EXPANDED)
    rollouts, uids = make_rollouts(result)
    with pytest.raises(ConfigError, match="parallel paths are several rows"):
        rollouts.run(uids, global_step=0)


def test_a_failed_episode_with_tokens_is_outside_the_loss():
    """A failed episode has no token in the loss and no reward."""
    rollouts, uids = make_rollouts(make_result(make_task("a"), make_trajectory(), status=Status.FAILED))
    rows = rollouts.run(uids, global_step=0)
    assert rows["env_mask"] == [[0, 0, 0, 0, 0]]
    assert rows[REWARD] == [None]


def test_prompts_find_their_tasks():
    """A prompt finds its task, also with keys that a data set filled with None; equal or unknown prompts raise."""
    tasks = {uid: make_task(uid, text) for uid, text in (("a", "One"), ("b", "Two"), ("c", "Two"))}
    rollouts = Rollouts(FakeManager(None), tasks)
    assert rollouts.find_uid([{"role": "user", "content": "One", "name": None}]) == "a"
    with pytest.raises(DataError, match="several tasks"):
        rollouts.find_uid([{"role": "user", "content": "Two"}])
    with pytest.raises(DataError, match="no task has the prompt"):
        rollouts.find_uid("Three")
    with pytest.raises(DataError, match="no task has the uid 'x'"):
        rollouts.run(["x"], global_step=0)


def test_several_trajectories_are_rejected():
    """An episode with several trajectories raises, because GRPOTrainer has one row per completion."""
    task = make_task("a")
    result = make_result(task, make_trajectory(), reward=1.0)
    two = type(result)(task=task, status=Status.COMPLETED, trajectories=(make_trajectory(), make_trajectory()))
    rollouts, uids = make_rollouts(two)
    with pytest.raises(ConfigError, match="2 trajectories"):
        rollouts.run(uids, global_step=0)


def test_trajectories_that_are_not_trained_are_left_out():
    """One trained trajectory is the row, whatever else the episode has; without one the row trains nothing."""
    records = (make_trajectory(answer=(8,)), make_trajectory(answer=(9,)))
    scores = (TrajectoryScore(value=1.0), TrajectoryScore(value=0.5))
    for trained, completion, mask in (((False, True), [9, 3, 4, 2], [1, 0, 0, 1]), ((False, False), None, [0])):
        lineage = tuple(RecordLineage(trained=each) for each in trained)
        result = evolve(
            make_result(make_task("a"), records[0], reward=1.0), trajectories=records, scores=scores, lineage=lineage
        )
        rollouts, uids = make_rollouts(result)
        rows = rollouts.run(uids, global_step=0)
        assert (rows[REWARD], rows["env_mask"]) == ([1.5], [mask])
        assert completion is None or rows["completion_ids"] == [completion]


@pytest.mark.parametrize("option", ["top_p=0.9", "top_k=20"])
def test_a_truncated_distribution_is_rejected(option, tmp_path):
    """Top-p and top-k raise, because TRL would compute different log-probabilities."""
    path = tmp_path / "run.yaml"
    path.write_text("data: {path: tasks.jsonl}\nagent: single_turn\nengine: scripted\n", encoding="utf-8")
    config = load_config(path, [f"rollout.sampling.{option}"])
    with pytest.raises(ConfigError, match=r"set top_p=1\.0 and top_k=-1"):
        Rollouts.from_config(config, [make_task("a")])


def test_the_data_set_and_the_reward():
    """The data set has messages and uid; the reward function returns turnwise's reward or None."""
    data = build_dataset([make_task("a"), make_task("b", "Other?")])
    assert data[1] == {"prompt": [{"role": "user", "content": "Other?"}], UID: "b"}
    assert turnwise_reward(["x", "y"], **{REWARD: [1.0, None]}) == [1.0, None]
    assert turnwise_reward(["x"]) == [None]
