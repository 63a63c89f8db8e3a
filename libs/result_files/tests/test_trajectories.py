"""Tests of `turnwise_result_files.trajectories`."""

import json
import math
import tempfile
import time
from pathlib import Path
from types import MappingProxyType

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import DataError
from turnwise.record.limit import ReachedLimit
from turnwise.record.lineage import RecordLineage
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import (
    EpisodeMetrics,
    Fault,
    Placement,
    Status,
    Task,
    TokenScore,
    TrajectoryScore,
    TurnScore,
)
from turnwise_result_files import row_file
from turnwise_result_files.row_schema import ADDED, SCHEMA, VERSION
from turnwise_result_files.trajectories import TrajectoryWriter, read_results, read_training_step
from turnwise_testing.inputs.strategies import trajectories

few = settings(max_examples=25, deadline=None)
texts = st.text(max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 1000)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | floats | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
json_objects = st.dictionaries(texts, json_values, max_size=2)
messages = st.lists(json_objects, max_size=2).map(tuple)
numbers = st.dictionaries(texts, floats, max_size=2)


def build_score(record: Trajectory, level: str, value: float, at: Placement, extra: dict):
    """Make a score of a level that fits a record."""
    if level == "trajectory":
        return TrajectoryScore(value=value, at=at, extra=extra)
    if level == "turn":
        return TurnScore(values=(value,) * len(record.turns()), extra=extra)
    return TokenScore(values=tuple(value * mask for mask in record.response_mask.tolist()), extra=extra)


@st.composite
def episode_results(draw: st.DrawFn):
    """Draw an episode with something in every attribute."""
    records = tuple(draw(st.lists(trajectories(max_steps=4), max_size=2)))
    score = st.tuples(st.sampled_from(["trajectory", "turn", "token"]), floats, st.sampled_from(Placement), numbers)
    scored, described = draw(st.booleans()), draw(st.booleans())
    lines = st.builds(
        RecordLineage,
        parent=st.none() | counts,
        num_shared_tokens=counts,
        kind=texts,
        label=texts,
        trained=st.booleans(),
    )
    return EpisodeResult(
        task=Task(
            messages=draw(messages),
            uid=draw(texts.filter(bool)),
            sample_index=draw(counts),
            agent_name=draw(texts),
            ground_truth=draw(json_values),
            data_source=draw(texts),
            extra=draw(json_objects),
        ),
        rollout_n=draw(counts),
        global_step=draw(counts),
        validation=draw(st.booleans()),
        agent_name=draw(texts),
        status=draw(st.sampled_from(Status)),
        fault=draw(st.none() | st.builds(Fault, owner=st.just("tool"), kind=texts, message=texts, traceback=texts)),
        trajectories=records,
        scores=tuple(build_score(record, *draw(score)) for record in records) if scored else (),
        messages=draw(messages),
        lineage=tuple(draw(lines) for _record in records) if described else (),
        metrics=EpisodeMetrics(
            total_s=draw(floats),
            num_turns=draw(counts),
            num_tokens=draw(st.dictionaries(texts, counts, max_size=2)),
            mask_ratio=draw(floats),
            replicas=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=2))),
            extra=draw(numbers),
        ),
        key=draw(texts),
        worker=draw(texts),
    )


def assert_same(expected: list[EpisodeResult], actual: list[EpisodeResult]) -> None:
    """Compare episodes in everything, records array by array and type by type."""
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        for attribute in attrs.fields(EpisodeResult):
            if attribute.name != "trajectories":
                assert getattr(one, attribute.name) == getattr(other, attribute.name), attribute.name
        assert len(one.trajectories) == len(other.trajectories)
        for record, restored in zip(one.trajectories, other.trajectories, strict=True):
            saved, again = record.to_dict(), restored.to_dict()
            assert list(saved) == list(again)
            for name, column in saved.items():
                assert np.array_equal(column, again[name]), name
                assert getattr(column, "dtype", None) == getattr(again[name], "dtype", None), name
            assert record.next_position == restored.next_position


def episode(*records: Trajectory, uid: str = "t0", **columns: object) -> EpisodeResult:
    task = Task(messages=({"role": "user", "content": "a"},), uid=uid)
    return EpisodeResult(**{"task": task, "status": Status.COMPLETED, "trajectories": records} | columns)


def trajectory() -> Trajectory:
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.25], 2)
    record.add_observation([5])
    return record


def write(path: Path, *results: EpisodeResult, **options: object) -> Path:
    with TrajectoryWriter(path, **options) as writer:
        for result in results:
            writer.write(result)
    return path


ODD = (
    st.none()
    | floats
    | texts
    | st.builds(object)
    | st.complex_numbers()
    | st.binary(max_size=4)
    | st.builds(lambda: 10**5000)
)
KEYS = texts | st.integers() | st.tuples(st.integers())
odd_values = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
FORMATS = pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])


class TestRoundTrip:
    """Reading restores the written episodes."""

    @FORMATS
    @few
    @given(results=st.lists(episode_results(), max_size=4), rows_per_group=st.integers(1, 3))
    def test_restores_everything(self, suffix, results, rows_per_group):
        """Records, scores, faults, tasks and metrics come back exactly, in order, however rows were grouped."""
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / f"trajectories{suffix}", *results, rows_per_group=rows_per_group)
            assert_same(results, read_results(path))
            assert_same(results, read_results(folder))

    @FORMATS
    def test_restored_records_go_on(self, tmp_path, suffix):
        """A record that was read takes more tokens as the first one would."""
        (result,) = read_results(write(tmp_path / f"t{suffix}", episode(trajectory())))
        expected = trajectory()
        for record in (expected, result.trajectories[0]):
            record.add_action([9], [-1.0], 4)
        assert expected.position_ids.tolist() == result.trajectories[0].position_ids.tolist()

    @FORMATS
    def test_rewards_that_are_no_numbers(self, tmp_path, suffix):
        """A score may be nan or infinite without costing the run its file."""
        scores = (TrajectoryScore(value=math.nan, extra={"a": math.inf}),)
        (result,) = read_results(write(tmp_path / f"t{suffix}", episode(trajectory(), scores=scores)))
        assert math.isnan(result.scores[0].value)
        assert result.scores[0].extra == {"a": math.inf}

    @FORMATS
    def test_what_json_has_not_is_written_as_text(self, tmp_path, suffix):
        """Arrays become lists, other objects their text, and half surrogate pairs their escape or stay in JSON."""
        metrics = EpisodeMetrics(extra={"a": np.float32(0.5)})
        said = ({"role": "tool", "content": "\ud800", "path": Path("x"), "ids": np.arange(2)},)
        extra = MappingProxyType({"a": 1})
        fault = Fault(owner="tool", kind="E", message="bad \udcff")
        task = Task(messages=said, uid="u", extra=extra)
        result = episode(trajectory(), metrics=metrics, messages=said, fault=fault, task=task)
        (read,) = read_results(write(tmp_path / f"t{suffix}", result))
        assert read.messages == ({"role": "tool", "content": "\ud800", "path": "x", "ids": [0, 1]},)
        assert read.metrics.extra == {"a": 0.5}
        assert read.task.extra == extra
        assert read.fault.message == "bad \\udcff"


class TestFile:
    """Columns of the file."""

    def test_columns(self):
        """Every attribute of a result has its column, so that no new one is forgotten."""
        metrics = {a.name for a in attrs.fields(EpisodeMetrics)} - {"extra"} | {"metrics_extra"}
        fault = {f"fault_{a.name}" for a in attrs.fields(Fault)}
        limit = {f"limit_{a.name}" for a in attrs.fields(ReachedLimit)}
        elsewhere = {"task", "fault", "limit", "trajectories", "scores", "metrics"}
        elsewhere.add("unfinished")  # in its own file
        result = {a.name for a in attrs.fields(EpisodeResult)} - elsewhere
        task = {a.name for a in attrs.fields(Task)} - {"extra", "messages", "agent_name"}
        assert metrics | fault | limit | result | task | {"task_messages", "task_agent_name", "task_extra"} <= set(
            SCHEMA.names
        )

    def test_parquet_is_plain_and_readable_by_others(self, tmp_path):
        """Numbers are numbers, texts are texts, the rest is JSON, and the texts are decoded."""
        scores = (TrajectoryScore(value=0.5),)
        result = episode(trajectory(), scores=scores, messages=({"role": "user", "content": "é"},))
        path = write(tmp_path / "t.parquet", result, decode=lambda ids: " ".join(map(str, ids)))
        (row,) = pq.read_table(path).to_pylist()
        assert row["prompt_text"] == "1 2"
        assert row["response_text"] == "3 4 5"
        assert row["response_mask"] == [1, 1, 0]
        assert row["reward"] == 0.5
        assert row["segments"] == [
            {"origin": "action", "start": 2, "stop": 4, "block": -1, "path": -1},
            {"origin": "observation", "start": 4, "stop": 5, "block": -1, "path": -1},
        ]
        assert row["messages"] == '[{"role": "user", "content": "é"}]'
        assert row["fault_owner"] is None

    def test_jsonl_has_no_json_within_json(self, tmp_path):
        """A line is one object."""
        path = write(tmp_path / "t.jsonl", episode(trajectory()))
        row = json.loads(path.read_text())
        assert row["task_messages"] == [{"role": "user", "content": "a"}]
        assert row["response_ids"] == [3, 4, 5]
        assert set(row) == set(SCHEMA.names)

    def test_an_episode_without_trajectory_has_a_row(self, tmp_path):
        """Nothing that happened is lost."""
        path = write(tmp_path / "t.parquet", episode(status=Status.FAILED))
        (row,) = pq.read_table(path).to_pylist()
        assert (row["trajectory_index"], row["prompt_ids"], row["status"]) == (None, None, "failed")

    def test_joins_the_batches_of_seconds_in_groups(self, tmp_path, monkeypatch):
        """A complete file has groups of many batches; a group ends before its bound of rows, or of bytes."""

        def group_sizes():
            path = write(tmp_path / "t.parquet", *[episode(trajectory())] * 7, rows_per_group=2)
            metadata = pq.ParquetFile(path).metadata
            assert len(read_results(path)) == 7
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

        assert group_sizes() == [7]
        monkeypatch.setattr(row_file, "_GROUP_ROWS", 5)
        assert group_sizes() == [4, 3]
        monkeypatch.setattr(row_file, "_GROUP_BYTES", 1)
        assert group_sizes() == [2, 2, 2, 1]


class TestWriter:
    """When a file is there."""

    @FORMATS
    def test_an_interrupt_keeps_what_came(self, tmp_path, suffix):
        """Leaving by an exception closes: the file is whole, named, and holds all that was written."""
        path = tmp_path / "new" / f"t{suffix}"

        def run() -> None:
            with TrajectoryWriter(path) as writer:
                writer.write(episode(trajectory()))
                assert not path.exists()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run()
        assert len(read_results(path)) == 1
        assert [file.name for file in path.parent.iterdir()] == [f"t{suffix}"]

    def test_closing_twice(self, tmp_path):
        """The second time does nothing."""
        writer = TrajectoryWriter(tmp_path / "t.parquet")
        writer.close()
        (tmp_path / "t.parquet").unlink()
        writer.close()
        assert not list(tmp_path.iterdir())

    def test_flushed_lines_survive_a_kill(self, tmp_path):
        """A JSONL file that was never closed holds its lines under the temporary name."""
        writer = TrajectoryWriter(tmp_path / "t.jsonl", rows_per_group=1)
        writer.write(episode(trajectory()))
        assert len((tmp_path / "t.jsonl.partial").read_text().splitlines()) == 1
        writer.close()

    def test_unknown_suffix(self, tmp_path):
        """The formats are listed, for reading and for writing."""
        (tmp_path / "t.csv").touch()
        for act in (TrajectoryWriter, read_results):
            with pytest.raises(DataError, match=r"t\.csv: suffix '\.csv' is none of \.parquet, \.jsonl$"):
                act(tmp_path / "t.csv")

    @FORMATS
    @pytest.mark.parametrize(
        ("odd", "owner", "said"),
        [
            ({"scores": (TrajectoryScore(value=1.0),) * 2}, "reward", "2 scores for 1 trajectories"),
            ({"messages": ({"role": object()}, {1: {2: 3}})}, None, ""),
            ({"agent_name": 7}, None, ""),
            ({"metrics": EpisodeMetrics(num_turns="many")}, "agent", "cannot be written: "),
        ],
    )
    def test_an_odd_episode_costs_no_other(self, tmp_path, suffix, odd, owner, said):
        """It fails where its values have no place in the file; the episodes around it are written as they are."""
        good = [episode(trajectory(), uid=uid) for uid in ("first", "last")]
        with TrajectoryWriter(tmp_path / f"t{suffix}") as writer:
            written = [writer.write(each) for each in (good[0], episode(trajectory(), uid="odd", **odd), good[1])]

        read = read_results(tmp_path / f"t{suffix}")
        assert [each.task.uid for each in read] == ["first", "odd", "last"]
        assert_same(good, [read[0], read[2]])
        assert (read[1].fault and read[1].fault.owner) == (written[1].fault and written[1].fault.owner) == owner
        assert said in (read[1].fault.message if read[1].fault else "")

    @few
    @given(
        value=st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
    )
    def test_any_value_of_a_plugin_can_be_written(self, value):
        """Whatever is in a message, the file can be read, and JSON values come back as they were."""
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "t.parquet", episode(messages=({"role": "user", "content": value},)))
            (read,) = read_results(path)
        assert read.messages[0]["role"] == "user"
        assert read.status is Status.COMPLETED

    def test_a_quiet_tail_is_on_disk(self, tmp_path):
        """An episode that no other follows can be read without another call of the writer."""
        writer = TrajectoryWriter(tmp_path / "t.parquet")
        writer.write(episode(trajectory()))
        deadline = time.monotonic() + 600
        while not (tmp_path / "t.parquet.partial").exists() or not read_results(tmp_path / "t.parquet.partial"):
            assert time.monotonic() < deadline, "the episode was not written"
            time.sleep(0.05)
        writer.close()


class TestReadErrors:
    """One line for each file that cannot be read."""

    def error_of(self, path: Path) -> str:
        with pytest.raises(DataError) as caught:
            read_results(path)
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(str(path))

    def test_missing(self, tmp_path):
        """A file that is not there, and directories with too few or too many."""
        assert self.error_of(tmp_path / "t.parquet") == ": no such file"
        assert self.error_of(tmp_path) == ": holds neither of trajectories.parquet and trajectories.jsonl"
        for suffix in (".parquet", ".jsonl"):
            write(tmp_path / f"trajectories{suffix}")
        assert self.error_of(tmp_path) == ": holds both trajectories.parquet and trajectories.jsonl"

    def test_corrupt_parquet(self, tmp_path):
        """Bytes that are no Parquet file."""
        (tmp_path / "t.parquet").write_bytes(b"nothing")
        assert ", row 0: cannot be read as a trajectory: ArrowInvalid: " in self.error_of(tmp_path / "t.parquet")

    def test_other_columns(self, tmp_path):
        """A Parquet file of something else."""
        pq.write_table(pa.table({"a": [1]}), tmp_path / "t.parquet")
        expected = ", row 0: cannot be read as a trajectory: ValueError: has no column 'uid'"
        assert self.error_of(tmp_path / "t.parquet").startswith(expected)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"trajectory_index": 1}, "ValueError: trajectory 1 does not follow the one before it"),
            ({"status": "fine"}, "ValueError: 'fine' is not a valid Status"),
            ({"logprobs": [0.0]}, "ValueError: column 'logprobs' has 1 values, expected 3"),
            ({"segments": None}, "ValueError: column 'segments' is null"),
            ({"score_level": "odd"}, "ValueError: column 'score_values' is None"),
        ],
    )
    def test_tampered_rows(self, tmp_path, change, named):
        """The error names the row, counted from 0, and its fault."""
        path = write(tmp_path / "t.jsonl", episode(), episode(trajectory()))
        first, second = path.read_text().splitlines()
        path.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
        assert self.error_of(path).startswith(f", row 1: cannot be read as a trajectory: {named}")

    def test_a_line_that_was_cut(self, tmp_path):
        """A torn last line is an error, not a lost episode."""
        path = write(tmp_path / "t.jsonl", episode(trajectory()))
        path.write_text(path.read_text() + '{"uid": ')
        assert ", row 1: cannot be read as a trajectory: JSONDecodeError: " in self.error_of(path)


class TestKilled:
    """Files of a killed writer."""

    @pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
    def test_every_whole_piece_can_be_read(self, tmp_path, suffix):
        """However few bytes came to the disk, the episodes that were written whole are read, in order."""
        message = {"role": "user", "content": "x"}
        results = [
            EpisodeResult(
                task=Task(messages=(message,), uid=f"t{i}"), status=Status.COMPLETED, trajectories=(simple(i),)
            )
            for i in range(4)
        ]
        writer = TrajectoryWriter(tmp_path / f"trajectories{suffix}", rows_per_group=1)
        for result in results:
            writer.write(result)
        left = tmp_path / f"trajectories{suffix}.partial"
        data = left.read_bytes()
        assert [r.uid for r in read_results(tmp_path)] == [r.uid for r in results]
        seen = []
        for size in range(0, len(data), max(1, len(data) // 60)):
            left.write_bytes(data[:size])
            read = read_results(left)
            assert [r.uid for r in read] == [r.uid for r in results[: len(read)]]
            assert all(one.trajectories[0].logprobs.tolist() == [-0.5] * 3 for one in read)
            seen.append(len(read))
        left.write_bytes(data)
        writer.close()

        assert sorted(seen) == seen
        assert {0, 1, 2, 3} <= set(seen)
        assert not left.exists()
        assert [r.uid for r in read_results(tmp_path)] == [r.uid for r in results]


def simple(number):
    """A record of one turn."""
    trajectory = Trajectory([number])
    trajectory.add_action([1, 2, 3], [-0.5] * 3)
    return trajectory


class TestTrainingStep:
    """The file of a training step has the advantages of its episodes."""

    @FORMATS
    @few
    @given(data=st.data())
    def test_restores_advantages(self, suffix, data):
        """Episodes, the step and the advantages of each trajectory come back; a trajectory may have none."""
        results = data.draw(st.lists(episode_results(), min_size=1, max_size=3))
        advantages = [
            [
                data.draw(st.none() | st.just(np.arange(record.num_response_tokens, dtype=np.float32) / 4 - 1))
                for record in result.trajectories
            ]
            for result in results
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"step{suffix}"
            with TrajectoryWriter(path, training_step=7) as writer:
                for result, values in zip(results, advantages, strict=True):
                    writer.write(result, values)

            trained = read_training_step(path)
            assert_same(results, read_results(path))

        assert_same(results, [each.result for each in trained])
        assert {7} == {each.step for each in trained}
        for expected, each in zip(advantages, trained, strict=True):
            assert [None if one is None else one.tolist() for one in expected] == [
                None if other is None else other.tolist() for other in each.advantages
            ]

    @FORMATS
    def test_a_rollout_is_no_training_step(self, tmp_path, suffix):
        """The files of a rollout have no such columns, and the error names the file."""
        path = write(tmp_path / f"trajectories{suffix}", episode(trajectory()))
        with pytest.raises(DataError, match=f"{path}: the file of a rollout, not of a training step"):
            read_training_step(path)

    def test_the_columns_have_a_version(self, tmp_path):
        """Both kinds of Parquet files tell the version of their columns, and have no column that is not documented."""
        write(tmp_path / "a.parquet", episode(trajectory()))
        write(tmp_path / "b.parquet", episode(trajectory()), training_step=1)

        found = [pq.read_schema(tmp_path / name) for name in ("a.parquet", "b.parquet")]

        assert [str(VERSION)] * 2 == [each.metadata[b"turnwise_schema"].decode() for each in found]
        assert [SCHEMA.names, [*SCHEMA.names, "training_step", "advantages"]] == [each.names for each in found]

    @pytest.mark.parametrize("training_step", [None, 1])
    def test_a_file_of_the_first_version_is_read(self, tmp_path, training_step):
        """A file without the columns of later versions has its episodes, without the values of these columns."""
        result = episode(trajectory(), metrics=EpisodeMetrics(num_turns=1, replicas=(3, 0)))
        path = write(tmp_path / "t.parquet", result, training_step=training_step)
        assert_same([result], read_results(path))
        old = pq.read_table(path).drop_columns([*ADDED]).replace_schema_metadata({"turnwise_schema": "1"})
        pq.write_table(old, path)

        assert_same([attrs.evolve(result, metrics=EpisodeMetrics(num_turns=1))], read_results(path))

    def test_another_version_is_named(self, tmp_path):
        """A file with the columns of another version is refused with both versions."""
        table = pq.read_table(write(tmp_path / "t.parquet", episode(trajectory()))).drop_columns(["uid"])
        pq.write_table(table.replace_schema_metadata({"turnwise_schema": "99"}), tmp_path / "t.parquet")
        with pytest.raises(
            DataError, match="of another version: 99 in the file, but this turnwise reads versions 1 to 6"
        ):
            read_results(tmp_path / "t.parquet")
