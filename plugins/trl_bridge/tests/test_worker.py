"""The rollout worker and the weight transfer for TRL's AsyncGRPOTrainer."""

import queue

import numpy as np
import pytest
import torch
from attrs import evolve
from fake_manager import FakeManager, make_result, make_task, make_trajectory

from turnwise import Status
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.record.lineage import RecordLineage
from turnwise_trl_bridge.tree_attention import sdpa_tree_attention
from turnwise_trl_bridge.worker import EngineWeights, RolloutWorker, build_samples

pytestmark = pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")


def test_samples_carry_the_record_and_the_group_s_advantage():
    """A sample has the full row with the prompt outside the mask, and the normalised advantage of its group."""
    task = make_task("a")
    results = [make_result(task, make_trajectory(version=4), reward=reward) for reward in (1.0, 0.0, 0.0, 1.0)]
    samples = build_samples(results, 7, version_offset=1)
    expected = 0.5 / (np.std([1, 0, 0, 1], ddof=1) + 1e-4)
    assert [sample.advantage for sample in samples] == pytest.approx([expected, -expected, -expected, expected])
    first = samples[0]
    assert first.input_ids.tolist() == [5, 6, 7, 8, 9, 3, 4, 2]
    assert first.completion_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert first.old_log_probs.tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, -0.25]
    assert (first.model_version, first.group_id, first.metrics["reward"]) == (3, 7, 1.0)


def test_trajectories_that_are_not_trained_give_no_sample():
    """The other trajectories of the episode do."""
    results = [make_result(make_task("a"), make_trajectory(), reward=reward) for reward in (1.0, 0.0)]
    results[0] = evolve(results[0], lineage=(RecordLineage(trained=False),))
    assert [sample.metrics["reward"] for sample in build_samples(results, 7)] == [0.0]


def test_failed_episodes_are_ignored():
    """A failed episode is neither in the baseline nor a sample; a group of one gives no sample."""
    task = make_task("a")
    good = [make_result(task, make_trajectory(), reward=reward) for reward in (1.0, 0.0)]
    bad = make_result(task, make_trajectory(), status=Status.FAILED)
    assert len(build_samples([*good, bad], 0)) == 2
    assert build_samples([good[0], bad], 0) == []


def test_parallel_paths_are_rejected():
    """Parallel paths raise, because TRL's tree has one parent per segment."""
    record = make_trajectory()
    paths = record.fork(2)
    for path in paths:
        path.add_action(np.asarray([10], np.int32), np.zeros(1, np.float32), 0)
    record.join(paths)
    results = [make_result(make_task("a"), record, reward=reward) for reward in (0.0, 1.0)]
    with pytest.raises(ConfigError, match="parallel paths"):
        build_samples(results, 0)


def test_a_worker_runs_until_it_is_stopped():
    """The worker cycles through the tasks, waits for a slow trainer, and stops its threads."""
    manager = FakeManager(lambda task, number: make_result(task, make_trajectory(), reward=float(number)))
    worker = RolloutWorker(manager, [make_task("a"), make_task("b")], num_generations=2, queue_size=4)
    manager.weight_version = 3
    worker.update_model_version(1)
    worker.start()
    samples = [worker.rollout_buffer.get(timeout=600) for _ in range(20)]
    worker.check_health(60)
    worker.stop()
    assert manager.aborted
    assert len({sample.group_id for sample in samples}) >= 10
    assert {sample.model_version for sample in samples} == {-2}
    assert worker.metrics_queue.get_nowait() == {"rollout/reward": 0.5}


def test_a_failure_reaches_the_trainer():
    """`check_health` raises the error of a thread, and an error when no group finishes."""

    def fail(_task, _number):
        raise TurnwiseError("the engine died")

    worker = RolloutWorker(FakeManager(fail), [make_task("a")], num_generations=2)
    worker.start()
    worker.stop()
    with pytest.raises(TurnwiseError, match="turnwise rollouts stopped: the engine died"):
        worker.check_health(60)
    idle = RolloutWorker(FakeManager(None), [make_task("a")], num_generations=2)
    with pytest.raises(TurnwiseError, match="no group of episodes has finished"):
        idle.check_health(-1)
    with pytest.raises(queue.Empty):
        idle.rollout_buffer.get_nowait()


def test_invalid_settings_are_rejected():
    """Groups of one and an empty list of tasks raise."""
    with pytest.raises(ConfigError, match="num_generations"):
        RolloutWorker(FakeManager(None), [make_task("a")], num_generations=1)
    with pytest.raises(ConfigError, match="tasks is empty"):
        RolloutWorker(FakeManager(None), [])


def test_the_transfer_copies_tensors():
    """A later in-place change of the trainer's tensors does not change the sent weights."""
    manager, weight = FakeManager(None), torch.ones(3)
    transfer = EngineWeights(manager)
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter([("w", weight)]))
    transfer.resume()
    transfer.destroy()
    weight += 1
    assert manager.weights["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("window", [None, 3])
def test_tree_attention_equals_separate_rows(window):
    """Each of two branches attends to the root and itself, like a separate row."""
    torch.manual_seed(0)
    root, left, right = 3, 2, 4
    total = root + left + right
    query, key, value = torch.randn(1, 4, total, 8), torch.randn(1, 2, total, 8), torch.randn(1, 2, total, 8)
    paths = [list(range(3)), [0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8]]
    out, _weights = sdpa_tree_attention(
        None,
        query,
        key,
        value,
        None,
        tree_kv_index=torch.tensor([index for path in paths for index in path]),
        tree_cu_seqlens_q=torch.tensor([0, 3, 5, 9]),
        tree_cu_seqlens_k=torch.tensor([0, 3, 8, 15]),
        scaling=0.3,
        sliding_window=window,
    )
    for path in paths[1:]:
        positions = torch.arange(len(path))
        seen = positions[None] <= positions[:, None]
        if window:
            seen &= positions[None] > positions[:, None] - window
        rows = query[:, :, path], key[:, :, path].repeat_interleave(2, 1), value[:, :, path].repeat_interleave(2, 1)
        scores = (rows[0] @ rows[1].transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
        expected = (scores.softmax(-1) @ rows[2]).transpose(1, 2)
        assert torch.allclose(out[:, path], expected, atol=1e-6)
    with pytest.raises(NotImplementedError, match="soft cap"):
        sdpa_tree_attention(
            None,
            query,
            key,
            value,
            None,
            tree_kv_index=torch.tensor([0]),
            tree_cu_seqlens_q=torch.tensor([0, 1]),
            tree_cu_seqlens_k=torch.tensor([0, 1]),
            softcap=1.0,
        )
