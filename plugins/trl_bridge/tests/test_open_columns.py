"""Open columns and fields of a batch are in the rows for TRL, without pads."""

import pytest
import torch

from turnwise import ColumnSpec, Trajectory
from turnwise.batch.rollout_batch import collate
from turnwise.errors import ConfigError
from turnwise_testing.inputs.small_episodes import episode, trajectory
from turnwise_trl_bridge.rollouts import to_rows

ROUTES = ColumnSpec(name="routes", dtype="int16", shape=(2,), fill=-1, tokens="all")
RANK = ColumnSpec(name="rank", dtype="int32", fill=-1)


def test_columns_of_tokens_and_responses():
    """Each row has the values of its own tokens; the record without the column has the fill."""
    whole = [[index, index + 1] for index in range(6)]
    record = trajectory().with_column(ROUTES, whole).with_column(RANK, [2, 1, -1, 0])
    other = Trajectory([1])
    other.add_action([2], [-0.5])
    batch = collate([episode(record), episode(other)], pad_token_id=0).with_fields({"half": torch.ones(2)})
    rows = to_rows(batch)
    assert [whole, [[-1, -1]] * 2] == rows["routes"]
    assert [[2, 1, -1, 0], [-1]] == rows["rank"]
    assert [1.0, 1.0] == rows["half"]


@pytest.mark.parametrize("name", ["env_mask", "completion_ids", "prompt_ids"])
def test_a_column_with_a_name_of_trl(name):
    """It would replace what TRL trains on."""
    record = trajectory().with_column(ColumnSpec(name=name, dtype="uint8"), [1, 0, 0, 1])
    with pytest.raises(ConfigError, match=f"the column or field '{name}' has a name of the rows for TRL"):
        to_rows(collate([episode(record)], pad_token_id=0))
