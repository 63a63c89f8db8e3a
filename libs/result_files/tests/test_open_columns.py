"""Open columns in files of episodes: earlier versions, and damage."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import evolve

from turnwise import ColumnSpec, FinishReason, GenerateResult, SamplingParams, Status, Task, Trajectory
from turnwise.batch.packed_batch import collate_packed
from turnwise.errors import DataError
from turnwise.record.ended import EndedEpisode
from turnwise.record.lineage import EpisodeRecord
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.step_results import RecordedTurn
from turnwise_result_files import (
    TrajectoryWriter,
    episode_rows,
    load_unfinished,
    read_results,
    row_file,
    save_unfinished,
    trajectories,
)
from turnwise_result_files.batches import load_packed_batch, save_batch
from turnwise_result_files.episode_rows import rows_of
from turnwise_result_files.media import MediaFolder
from turnwise_result_files.resumption import earlier_run
from turnwise_result_files.row_file import ParquetFile
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


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "fill": np.finfo(np.float32).min},
        {"dtype": np.float32, "fill": np.float32("nan")},
        {"dtype": np.dtype("int32"), "fill": np.int64(-1), "version": np.int64(3)},
        {"dtype": "bool", "fill": np.bool_(True), "shape": np.array([2])},
    ],
)
def test_declarations_with_values_of_numpy(tmp_path, suffix, options):
    """Files of episodes, of unfinished ones and of batches give them back."""
    spec = ColumnSpec(name="margin", tokens="none", **options)
    result = episode(trajectory().with_column(spec, spec.filled(4)))
    path = tmp_path / f"t.{suffix}"
    with TrajectoryWriter(path) as writer:
        assert writer.write(result) is result
    (read,) = read_results(path)
    spec_of_result = EpisodeSpec(task=result.task, agent_name="a")
    save_unfinished(tmp_path / "u.jsonl", [EndedEpisode(spec=spec_of_result, result=result)])
    (unfinished,) = load_unfinished(tmp_path / "u.jsonl")
    packed = collate_packed([result], pad_token_id=0)
    save_batch(packed, tmp_path / "b.safetensors")

    for found in (read, unfinished.result):
        assert {"margin": spec} == found.trajectories[0].columns
        assert result.trajectories[0].column("margin").tobytes() == found.trajectories[0].column("margin").tobytes()
    loaded = load_packed_batch(tmp_path / "b.safetensors")
    assert str(packed.field_fills) == str(loaded.field_fills)
    assert packed.fields["margin"].numpy().tobytes() == loaded.fields["margin"].numpy().tobytes()


class Undeclared(ColumnSpec):
    """A declaration that no file takes."""

    def to_dict(self):
        return super().to_dict() | {"fill": object()}


def large(uid, num_bytes):
    """Return an episode with a column of some bytes for each of two tokens."""
    record = Trajectory([1])
    record.add_action([2, 3], [-0.5, -0.5])
    spec = ColumnSpec(name="large", dtype="uint8", shape=(num_bytes,), tokens="none")
    return episode(record.with_column(spec, np.full((2, num_bytes), len(uid), np.uint8)), uid=uid)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_large_episodes_are_written_soon(tmp_path, monkeypatch, suffix):
    """They do not wait for a count of episodes: memory and a batch of Arrow have few of them. The file is the same."""
    monkeypatch.setattr(trajectories, "_FLUSH_BYTES", 3000)
    monkeypatch.setattr(row_file, "_BATCH_BYTES", 3000)
    episodes = [large("a" * (1 + number % 3), size) for number, size in enumerate([10, 400, 400, 400, 3000, 10, 10])]
    path = tmp_path / f"t.{suffix}"
    with TrajectoryWriter(path, rows_per_group=1000) as writer:
        for number, each in enumerate(episodes):
            writer.write(each)
            if number == 4:
                assert 5 == len(read_results(tmp_path / f"t.{suffix}.partial"))
    read = read_results(path)
    assert [each.task.uid for each in episodes] == [each.task.uid for each in read]
    for one, other in zip(episodes, read, strict=True):
        assert one.trajectories[0].column("large").tobytes() == other.trajectories[0].column("large").tobytes()


@pytest.mark.slow
def test_more_than_two_gib(tmp_path):
    """More bytes of columns than an array of Arrow takes are written at once, from a writer that is never full."""
    path = tmp_path / "t.parquet"
    piece = ParquetFile.encode(rows_of(large("t0", 100 * 2**20), None, MediaFolder(tmp_path)))
    pieces = [piece] * 9  # the same memory
    assert sum(each.nbytes for each in pieces) > 2**31
    file = ParquetFile(path)
    file.write(pieces)
    file.close()
    assert ["t0"] * 9 == pq.read_table(path, columns=["uid"])["uid"].to_pylist()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("odd", ["a declaration", "a size", "a sum of sizes", "a sum of records"])
def test_a_column_that_no_file_takes(tmp_path, monkeypatch, suffix, odd):
    """Its episode fails, and is written without it; its other columns and the other episodes stay as they are."""
    monkeypatch.setattr(episode_rows, "_MAX_COLUMN_BYTES", 100)
    kind, shape, names = {
        "a declaration": (Undeclared, (), ["odd"]),
        "a size": (ColumnSpec, (100,), ["odd"]),
        "a sum of sizes": (ColumnSpec, (15,), ["odd", "odder"]),
        "a sum of records": (ColumnSpec, (15,), ["odd"]),
    }[odd]
    record = trajectory().with_column(RANK, [2, 1, -1, 0])
    for name in names:
        spec = kind(name=name, dtype="uint8", shape=shape, tokens="none")
        record = record.with_column(spec, spec.filled(4))
    good = [episode(trajectory().with_column(RANK, [2, 1, -1, 0]), uid=uid) for uid in ("first", "last")]
    path = tmp_path / f"t.{suffix}"
    records = [record, record] if odd == "a sum of records" else [record]
    with TrajectoryWriter(path) as writer:
        written = [writer.write(each) for each in (good[0], episode(*records, uid="odd"), good[1])]

    read = read_results(path)
    assert ["first", "odd", "last"] == [each.task.uid for each in read]
    kept = ["rank", "odd"] if odd.startswith("a sum") else ["rank"]
    assert [["rank"], kept, ["rank"]] == [list(each.trajectories[0].columns) for each in read]
    assert [Status.COMPLETED, Status.FAILED, Status.COMPLETED] == [each.status for each in read]
    assert kept == list(written[1].trajectories[0].columns)
    assert all(["rank"] == list(each.columns) for each in read[1].trajectories[1:])
    assert "cannot be written: " in read[1].fault.message
    assert [2, 1, -1, 0] == read[1].trajectories[0].column("rank").tolist()


NEWER = evolve(RANK, version=2)
OTHER = ColumnSpec(name="other", dtype="int32")


def spec_of(number):
    task = Task(messages=({"role": "user", "content": "a"},), uid=f"t{number}")
    return EpisodeSpec(task=task, agent_name="a", sampling=SamplingParams())


def ended(number, *specs):
    """Return the finished episode of a spec, whose record has some columns."""
    record = trajectory()
    for spec in specs:
        record = record.with_column(spec, [2, 1, -1, 0] if spec.name == "rank" else [0] * 4)
    return evolve(episode(record), task=spec_of(number).task)


def started(number, *specs, place="records"):
    """Return an unfinished episode with columns in a record, or in a turn that was not appended."""
    spec = spec_of(number)
    if place == "records":
        (record,) = ended(number, *specs).trajectories
        return UnfinishedEpisode(spec=spec, started=True, records=(EpisodeRecord(record, is_open=False),))
    values = {each.name: np.ones(1, np.int32) for each in specs}
    result = GenerateResult(token_ids=[1], logprobs=[-0.5], finish_reason=FinishReason.ABORT, columns=values)
    turn = RecordedTurn(position=(1, 0, -1, 0), result=result, specs={each.name: each for each in specs})
    return UnfinishedEpisode(spec=spec, started=True, turns=(turn,))


def resumed(folder, finished, unfinished, columns, num_episodes=4):
    """Return the state of a run with some episodes in its folder, where plugins declare some columns now."""
    with TrajectoryWriter(folder / "trajectories.parquet") as writer:
        for each in finished:
            writer.write(each)
    save_unfinished(folder / "unfinished.jsonl", unfinished)
    declared = {each.name: each for each in columns}
    return earlier_run(folder, [spec_of(number) for number in range(num_episodes)], None, columns=declared)


@pytest.mark.parametrize(
    ("finished", "unfinished", "columns"),
    [
        ([ended(0, RANK)], [], [NEWER]),
        ([ended(0, NEWER)], [], [RANK]),
        ([ended(1, OTHER), ended(0, OTHER, RANK)], [], [OTHER, NEWER]),
        ([], [started(0, RANK)], [NEWER]),
        ([], [started(0, RANK, place="turns")], [NEWER]),
        ([ended(1, OTHER)], [started(0, RANK)], [OTHER, NEWER]),
        ([], [EndedEpisode(spec=spec_of(0), result=ended(0, RANK))], [NEWER]),
        ([ended(1, NEWER), ended(0, RANK)], [], []),
        ([ended(1, NEWER), ended(0, RANK)], [], [NEWER]),
    ],
)
def test_a_run_with_another_declaration_is_not_resumed(tmp_path, finished, unfinished, columns):
    """Its batch could not hold both, and that would be noticed only when all its episodes have run."""
    with pytest.raises(DataError, match=r"--resume .*: episode 't[01]/0' has the column 'rank' in another declaration"):
        resumed(tmp_path, finished, unfinished, columns)


@pytest.mark.parametrize(
    ("finished", "unfinished", "columns"),
    [
        ([ended(0, RANK)], [started(1, RANK, place="turns")], [RANK]),
        ([ended(0, RANK), ended(1)], [started(2, OTHER)], [RANK, OTHER]),
        ([ended(0, RANK)], [], []),  # the plugin is not installed any more: other episodes have no values
        ([ended(number, RANK) for number in range(4)], [], [NEWER]),  # no episode is left to run
    ],
)
def test_a_run_with_the_same_declarations_is_resumed(tmp_path, finished, unfinished, columns):
    """And one without a plugin that it had."""
    earlier = resumed(tmp_path, finished, unfinished, columns)
    assert (len(finished), 4 - len(finished)) == (len(earlier.finished), len(earlier.todo))


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
