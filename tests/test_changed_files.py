"""Every command that reads episodes refuses a changed file in one line, with exit code 2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise.cli import main
from turnwise.plugin.host import load
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import EpisodeMetrics, Status, Task, TrajectoryScore
from turnwise_result_files import TrajectoryWriter
from turnwise_result_files.row_schema import JSON, SCHEMA, TRAINING

READERS: Final = {
    "show": ["show", "FILE"],
    "convert": ["convert", "FILE", "--to", "atif", "--out", "OUT"],
    "mask": ["mask", "FILE", "0", "--out", "OUT.png"],
    "view": ["view", "FILE", "--export", "OUT.html"],
}
"""The commands that read a file of episodes."""


@pytest.fixture(autouse=True, scope="module")
def one_host() -> Iterator[None]:
    """Load the plugins once: hundreds of commands would look for them again, which takes longer than to run."""
    with pytest.MonkeyPatch.context() as patch:
        host = load()
        patch.setattr("turnwise.cli.load", lambda _recipe: host)
        yield


def write_file(path: Path, training_step: int | None = None) -> Path:
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5, -0.25], 2)
    record.add_observation([5])
    task = Task(messages=[{"role": "user", "content": "x"}], uid="u")
    scores, metrics = (TrajectoryScore(value=1.0),), EpisodeMetrics(num_tokens={"prompt": 2}, extra={"a": 1.0})
    result = EpisodeResult(
        task=task,
        status=Status.COMPLETED,
        trajectories=(record,),
        scores=scores,
        messages=task.messages,
        metrics=metrics,
    )
    with TrajectoryWriter(path, training_step=training_step) as writer:
        writer.write(result, [None] if training_step is not None else None)
    return path


def refusals(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, tuple[int, str]]:
    """Return the exit code and the error of each reader that does not refuse a file in one line that names it."""
    wrong = {}
    for name, words in READERS.items():
        out = str(tmp_path / f"out {name}")
        code = main([word.replace("FILE", str(path)).replace("OUT", out) for word in words])
        error = capfd.readouterr().err
        if code != 2 or error.count("\n") != 1 or not error.startswith(f"turnwise: error: {path}"):
            wrong[name] = (code, error)
    return wrong


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    pq.write_table(change(pq.read_table(path)), path)
    return path


def put(name: str, value: object) -> Callable[[pa.Table], pa.Table]:
    """Return a change that replaces the value of a column of the only row."""

    def change(table: pa.Table) -> pa.Table:
        at = table.column_names.index(name)
        return table.set_column(at, table.schema.field(name), pa.array([value], table.schema.field(name).type))

    return change


def retype(name: str) -> Callable[[pa.Table], pa.Table]:
    """Return a change that gives a column another type: text, and numbers instead of text."""

    def change(table: pa.Table) -> pa.Table:
        other = pa.int64() if table.schema.field(name).type == pa.string() else pa.string()
        return table.set_column(table.column_names.index(name), name, pa.nulls(1, other))

    return change


NEVER_NULL: Final = [
    *("uid", "agent_name", "data_source", "status", "task_agent_name", "objective", "key", "worker"),
    *("sample_index", "rollout_n", "global_step", "validation", "trajectory_index", *JSON),
    *("prompt_ids", "response_ids", "response_mask", "logprobs", "weight_versions", "segments"),
    *("num_turns", "num_tool_calls", "num_tool_errors", "num_cached_tokens", "total_s", "mask_ratio", "tool_reward"),
]
SEGMENTS: Final = [
    {"origin": "action", "start": 2, "stop": 4, "block": -1, "path": -1},
    {"origin": "observation", "start": 4, "stop": 5, "block": -1, "path": -1},
]
VALUES: Final[list[tuple[str, object]]] = [
    *[("uid", ""), ("status", "lost"), ("objective", "lost"), ("rollout_n", -1), ("global_step", -1)],
    *[("trajectory_index", 1), ("trajectory_index", -1), ("num_turns", -1), ("num_tool_calls", -1)],
    *[("prompt_ids", [1, -5]), ("prompt_ids", [1]), ("prompt_ids", [1, None]), ("response_ids", [3, -5, 5])],
    *[("response_ids", [3, 4]), ("logprobs", [-0.5, float("nan"), 0.0]), ("logprobs", [-0.5, -0.25, -1.0])],
    *[("logprobs", [-0.5, None, 0.0]), ("logprobs", [-0.5]), ("weight_versions", [2, -1, -1])],
    *[("weight_versions", [2, 2, 2]), ("response_mask", [1, 1, 1]), ("response_mask", [2, 2, 0])],
    *[("position_ids", [0] * 5), ("block_start", [1] * 5), ("path_start", [1] * 5), ("segments", [])],
    *[("segments", SEGMENTS[:1]), ("segments", [SEGMENTS[0] | {"origin": "lost"}, SEGMENTS[1]])],
    *[("segments", [SEGMENTS[0] | {"stop": 10**9}, SEGMENTS[1]]), ("segments", [None, None])],
    *[("score_level", "lost"), ("score_at", "lost"), ("score_values", []), ("score_values", [None])],
    *[(name, text) for name in JSON for text in ("", "{", "[" * 100_000)],
    *[(name, text) for name in JSON if name != "ground_truth" for text in ("3", '"x"', "[[]]", "[null]")],
    *[("num_tokens", '{"prompt": "x"}'), ("metrics_extra", '{"a": null}')],
]


@pytest.mark.many_cases
@pytest.mark.parametrize("name", SCHEMA.names)
def test_a_missing_or_retyped_column(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """The line names the column."""
    for change in (lambda table: table.drop_columns([name]), retype(name)):
        path = rewrite(write_file(tmp_path / "t.parquet"), change)
        assert refusals(path, tmp_path, capfd) == {}
        main(["show", str(path)])
        assert f"column {name!r}" in capfd.readouterr().err


@pytest.mark.parametrize("version", ["99", "abc", "", "0"])
def test_another_version(tmp_path: Path, capfd: pytest.CaptureFixture[str], version: str) -> None:
    """A file of a later or of an unknown version is refused, though its columns are the known ones."""

    def change(table: pa.Table) -> pa.Table:
        return table.replace_schema_metadata({"turnwise_schema": version})

    assert refusals(rewrite(write_file(tmp_path / "t.parquet"), change), tmp_path, capfd) == {}


@pytest.mark.many_cases
@pytest.mark.parametrize("name", NEVER_NULL)
def test_a_null(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """A column that every episode has is never null."""
    path = rewrite(write_file(tmp_path / "t.parquet"), put(name, None))
    assert refusals(path, tmp_path, capfd) == {}


@pytest.mark.many_cases
@pytest.mark.parametrize(("name", "value"), [pytest.param(*each, id=f"{each[0]}={each[1]!r:.20}") for each in VALUES])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_value_that_cannot_be(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, value: object, suffix: str
) -> None:
    """A record that no run can have is refused, whatever its format, and so is a column of JSON of another kind."""
    path = write_file(tmp_path / f"t{suffix}")
    if suffix == ".parquet":
        rewrite(path, put(name, value))
    elif name in JSON:
        row: dict[str, Any] = json.loads(path.read_text()) | {name: "RAW"}
        path.write_text(json.dumps(row).replace('"RAW"', str(value)) + "\n")
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}) + "\n")

    assert refusals(path, tmp_path, capfd) == {}


@pytest.mark.parametrize("name", TRAINING)
def test_a_step_without_one_of_its_columns(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """The file of a training step has both columns of a training, of their types."""
    for change in (lambda table: table.drop_columns([name]), retype(name)):
        path = rewrite(write_file(tmp_path / "t.parquet", training_step=1), change)
        assert refusals(path, tmp_path, capfd) == {}


def test_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A pipe instead of a file is refused; nobody writes to it, so that a reader would wait for ever."""
    for suffix in (".parquet", ".jsonl", ".parquet.partial"):
        os.mkfifo(path := tmp_path / f"t{suffix}")
        assert refusals(path, tmp_path, capfd) == {}


def test_an_unchanged_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every reader reads the file that the tests change, also with one more column."""
    for suffix in (".parquet", ".jsonl"):
        assert set(refusals(write_file(tmp_path / f"t{suffix}"), tmp_path / suffix, capfd)) == {*READERS}
    more = rewrite(tmp_path / "t.parquet", lambda table: table.append_column("more", pa.array([1])))
    assert {code for code, _error in refusals(more, tmp_path / "more", capfd).values()} == {0}
