"""Small records, their episodes and a comparison of batches, for tests of code that reads episodes."""

from __future__ import annotations

from typing import Any

from turnwise import EpisodeResult, RolloutBatch, Status, Task, Trajectory
from turnwise.batch.columns import COLUMNS


def trajectory() -> Trajectory:
    """Return a record with two turns, which two weight versions sampled, and an observation between them."""
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.25], 2)
    record.add_observation([5])
    record.add_action([6], [-1.0], 3)
    return record


def forked() -> Trajectory:
    """Return a record with a block of two paths, one sampled and one forced, and a turn after it."""
    record = Trajectory([1])
    paths = record.fork(2)
    paths[0].add_action([2, 3], [-0.5, -0.5], 0)
    paths[1].add_forced([4])
    record.join(paths)
    record.add_action([5], [-1.0], 0)
    return record


def episode(*records: Trajectory, uid: str = "t0", status: Status = Status.COMPLETED, **columns: Any) -> EpisodeResult:
    """
    Return an episode with these records.

    Args:
        records: of the episode, in their order.
        uid: of its task.
        status: of its end.
        columns: further attributes of the result.
    """
    messages = ({"role": "user", "content": "a"},)
    return EpisodeResult(task=Task(messages=messages, uid=uid), status=status, trajectories=records, **columns)


def assert_same_batches(expected: RolloutBatch, actual: RolloutBatch) -> None:
    """Compare two batches in everything: rows, widths, pads, and each tensor with its dtype."""
    import torch

    assert expected.rows == actual.rows
    assert (expected.prompt_length, expected.pad_token_id) == (actual.prompt_length, actual.pad_token_id)
    assert list(expected.fields) == list(actual.fields)
    for name in (*COLUMNS, "attention_mask"):
        assert getattr(expected, name).dtype == getattr(actual, name).dtype, name
        assert torch.equal(getattr(expected, name), getattr(actual, name)), name
    for name, tensor in expected.fields.items():
        torch.testing.assert_close(actual.fields[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
