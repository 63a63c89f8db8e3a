"""Rows that are built while episodes arrive, and the bytes of the batches made of them."""

import pickle

import pytest
import torch
from attrs import evolve, fields

from turnwise import EpisodeResult, TrajectoryScore
from turnwise.batch.packed_batch import collate_packed, pack_rows
from turnwise.batch.rollout_batch import RolloutBatch, collate
from turnwise.batch.rows import collect_rows
from turnwise.errors import TrajectoryError
from turnwise.record.trajectory import Trajectory
from turnwise_testing.inputs.small_episodes import assert_same_batches, episode, forked, trajectory

PAD = 9


def test_rows_of_episodes_that_arrive_in_any_order():
    """The rows are in the order of the results' numbers."""
    results = [episode(trajectory(), uid="a"), episode(uid="b"), episode(forked(), trajectory(), uid="c")]
    rows = collect_rows((number, results[number]) for number in (2, 0, 1))
    assert_same_batches(collate(results, pad_token_id=PAD), RolloutBatch.from_rows(rows, pad_token_id=PAD))
    assert_same_batches(collate(results, pad_token_id=PAD), RolloutBatch.from_packed(pack_rows(rows, pad_token_id=PAD)))


def test_an_episode_with_wrong_scores_fails_after_all_have_arrived():
    """The error names the episode, and no episode is left running."""
    wrong = episode(trajectory(), uid="a", scores=(TrajectoryScore(value=1.0),) * 2)
    arrived = []

    def episodes():
        for number, result in enumerate((evolve(wrong, scores=()), wrong, evolve(wrong, scores=()))):
            arrived.append(number)
            yield number, result

    with pytest.raises(TrajectoryError, match=r"a/0: 2 scores for 1 trajectories$"):
        collect_rows(episodes())
    assert [0, 1, 2] == arrived


def page_episodes() -> list[EpisodeResult]:
    """Return episodes of the form that the performance of runs is measured with: 489 and 981 tokens on average."""
    results = []
    for number in range(16):
        record = Trajectory(range(486 + number % 7))
        for turn in range(4):
            record.add_action(range(200), [-0.5] * 200, 3)
            if turn < 3:
                record.add_observation(range(57 + number % 8))
        results.append(episode(record, uid=f"t{number}"))
    return results


def num_bytes(batch) -> int:
    """Return the bytes of the tensors of a batch that grow with its tokens, as a receiver of the batch gets them."""
    tensors = [getattr(batch, each.name) for each in fields(type(batch))]
    return sum(each.untyped_storage().nbytes() for each in tensors if isinstance(each, torch.Tensor) and each.ndim)


def test_the_bytes_of_a_batch():
    """Padded at most 3.5 times and packed at most 2.0 times the ids, the log-probabilities and the masks of tokens."""
    results = page_episodes()
    sizes = [(len(result.trajectories[0]), result.trajectories[0].num_response_tokens) for result in results]
    num_tokens, num_response = (sum(each) for each in zip(*sizes, strict=True))
    real_bytes = 4 * num_tokens + (4 + 1) * num_response
    padded, packed = collate(results, pad_token_id=PAD), collate_packed(results, pad_token_id=PAD)

    by_row = len(results) * (8 + 1 + 4)  # turns, `scored` and the reward
    columns, responses = padded.input_ids.numel(), padded.responses.numel()
    assert num_bytes(padded) == (4 + 4 + 1) * columns + (4 + 4 + 4 + 1 + 1) * responses + 2 * 4 + by_row
    assert num_bytes(padded) <= 3.5 * real_bytes
    for batch in (packed, padded.packed()):
        ends = 4 * (len(results) + 1) + 8 * len(results)
        assert num_bytes(batch) == 4 * num_tokens + (4 + 4 + 4 + 1 + 1) * num_response + 2 * 4 + by_row + ends
        assert num_bytes(batch) <= 2.0 * real_bytes
    for batch, factor in ((padded, 3.5), (packed, 2.0)):  # in another process too
        assert len(pickle.dumps(batch)) <= factor * real_bytes
