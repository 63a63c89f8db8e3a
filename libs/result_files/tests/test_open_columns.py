"""Open columns in files of episodes: earlier versions, and damage."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise import ColumnSpec
from turnwise.errors import DataError
from turnwise_result_files import TrajectoryWriter, read_results
from turnwise_result_files.row_schema import SCHEMA
from turnwise_testing.inputs.small_episodes import episode, trajectory

RANK = ColumnSpec(name="rank", dtype="int32", fill=-1)


def written(path):
    """Write an episode with a column, and return the table of its file."""
    with TrajectoryWriter(path) as writer:
        writer.write(episode(trajectory().with_column(RANK, [2, 1, -1, 0])))
    return pq.read_table(path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_both_forms_give_the_column_back(tmp_path, suffix):
    """Also to a process that has no plugin for it."""
    path = tmp_path / f"t.{suffix}"
    with TrajectoryWriter(path) as writer:
        writer.write(episode(trajectory().with_column(RANK, [2, 1, -1, 0])))
        writer.write(episode(trajectory(), uid="t1"))
    first, second = read_results(path)
    assert [2, 1, -1, 0] == first.trajectories[0].column("rank").tolist()
    assert ({"rank": RANK}, {}) == (first.trajectories[0].columns, second.trajectories[0].columns)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_file_of_an_earlier_version(tmp_path, version):
    """It has no such columns, and opens."""
    path = tmp_path / "t.parquet"
    table = written(path).drop_columns(["open_columns"])
    pq.write_table(table.replace_schema_metadata({"turnwise_schema": str(version)}), path)
    (result,) = read_results(path)
    assert {} == result.trajectories[0].columns


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("values", "????"),
        ("values", "AAAA"),
        ("values", ""),
        ("declaration", "{"),
        ("declaration", json.dumps({"name": "rank"})),
        ("declaration", json.dumps(RANK.to_dict() | {"name": "logprobs"})),
        ("declaration", json.dumps(RANK.to_dict() | {"dtype": "object"})),
    ],
)
def test_a_damaged_column_is_refused(tmp_path, name, value):
    """The error names the file."""
    path = tmp_path / "t.parquet"
    table = written(path)
    ((column,),) = table["open_columns"].to_pylist()
    place = table.schema.get_field_index("open_columns")
    damaged = pa.array([[column | {name: value}]], SCHEMA.field("open_columns").type)
    pq.write_table(table.set_column(place, table.schema.field(place), damaged), path)
    with pytest.raises(DataError, match=r"t\.parquet"):
        list(read_results(path))
