"""Damaged records are refused with the place of the damage."""

import numpy as np
import pytest

from turnwise import Trajectory
from turnwise.errors import InvariantError, TrajectoryError
from turnwise.record.columns import Origin, Segment
from turnwise.record.invariants import check_lineage, check_trajectory
from turnwise.record.lineage import RecordLineage
from turnwise.types import copy_json


def make_record(*more_ids):
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.25], weight_version=1)
    record.add_observation([5, *more_ids])
    return record


class Damaged:
    """A record with some attributes replaced."""

    def __init__(self, record, **replaced):
        self._record = record
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self._record, name)

    def __len__(self):
        return len(self._record)


@pytest.mark.parametrize(
    ("replaced", "text"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, "logprobs has 2 entries, expected 3"),
        ({"position_ids": np.arange(6)}, "position_ids has 6 entries, expected 5"),
        ({"segments": (Segment(Origin.ACTION, 3, 5),)}, "segment 3:5 does not follow token 2"),
        ({"segments": (Segment(Origin.ACTION, 2, 4),)}, "segments end at 4, the record at 5"),
    ],
)
def test_damage_is_located(replaced, text):
    """The undamaged record passes."""
    check_trajectory(make_record())
    with pytest.raises(InvariantError, match=f"^{text}$"):
        check_trajectory(Damaged(make_record(), **replaced))


@pytest.mark.parametrize("num_shared_tokens", [2, 4])
def test_a_branch_that_differs_from_its_parent(num_shared_tokens):
    """Shared prompts may be equal; shared actions would be trained twice."""
    lineage = [RecordLineage(), RecordLineage(parent=0, num_shared_tokens=num_shared_tokens)]
    records = [make_record(), make_record(6)]
    if num_shared_tokens == 2:
        check_lineage(records, lineage)
        return
    with pytest.raises(InvariantError, match="record 1 does not replay the tokens that it shares with record 0"):
        check_lineage(records, lineage)


def test_a_budget_below_zero():
    """It is refused, and the record stays."""
    record = make_record()
    with pytest.raises(TrajectoryError, match="response_budget must be at least 0, not -1"):
        record.truncated(-1)
    assert 5 == len(record)


@pytest.mark.parametrize("value", [None, 3, "x", [1, {"a": [2]}]])
def test_copies_of_json_values_are_equal_and_separate(value):
    """Plain values are themselves."""
    copied = copy_json(value)
    assert copied == value
    if isinstance(value, list):
        copied[1]["a"].append(3)
        assert [1, {"a": [2]}] == value
