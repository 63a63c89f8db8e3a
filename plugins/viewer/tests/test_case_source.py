"""An episode as the source of a test: it runs, it passes, and its episode is the recorded one."""

import subprocess
import sys

import numpy as np
import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from viewer_runs import HOSTILE, build_episode, build_parallel_record, failed_episode, several_records, write_run

from turnwise import ColumnSpec
from turnwise.types import Placement, Task, TokenScore, TrajectoryScore
from turnwise_testing.inputs.strategies import trajectories
from turnwise_viewer.run_folder import RunFolder


def source_of(folder, episode):
    """Return the source of the only episode of a run."""
    run = RunFolder.open(write_run(folder, [episode]))
    try:
        return run.case(run.index.table["key"][0].as_py())
    finally:
        run.close()


def run_case(source):
    """Run the tests of a source; return its episode."""
    names = {}
    exec(compile(source, "case.py", "exec"), names)
    for name, value in names.items():
        if name.startswith("test_"):
            value()
    return names["EPISODE"]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=trajectories(max_steps=5), value=st.floats(-8, 8, width=32))
def test_every_record_is_rebuilt(tmp_path_factory, record, value):
    """The source of any record, with blocks and branches too, gives a record with the same columns."""
    score = TokenScore(values=tuple(value * mask for mask in record.response_mask.tolist()))
    episode = build_episode(trajectories=(record,), scores=(score,))

    found = run_case(source_of(tmp_path_factory.mktemp("run"), episode))

    saved, expected = found.trajectories[0].to_dict(), record.to_dict()
    for name in ("token_ids", "logprobs", "origins", "weight_versions", "position_ids", "block_start", "path_start"):
        assert saved[name].tolist() == expected[name].tolist()
    assert saved["segments"] == expected["segments"]
    assert found.scores == (score,)


@pytest.mark.parametrize(
    "spec",
    [
        ColumnSpec(name="teacher", dtype="float32", fill=float("nan")),
        ColumnSpec(name="floor", dtype="float32", fill=float("-inf")),
        ColumnSpec(name="routes", dtype="int16", shape=(2, 3), fill=-1, tokens="all"),
        ColumnSpec(name="is_known", dtype="bool", fill=False, tokens="all"),
    ],
    ids=lambda spec: spec.name,
)
def test_open_columns_are_rebuilt(tmp_path, spec):
    """Values of any type and shape are there, also numbers that JSON cannot write."""
    record = build_parallel_record()
    size = record.num_response_tokens if spec.of_responses else len(record)
    values = spec.filled(size)
    if spec.tokens == "all":
        values[:-1] = 1
    else:
        values[record.response_mask == 1] = -1.5
    record = record.with_column(spec, values)

    (found,) = run_case(source_of(tmp_path, build_episode(trajectories=(record,)))).trajectories

    assert record.columns == found.columns
    assert np.array_equal(values, found.column(spec.name), equal_nan=spec.dtype == "float32")


ODD = Task(
    messages=({"role": "user", "content": HOSTILE},),
    uid='a"""b\'\\n',
    ground_truth=[1.5, {"x": float("inf")}, None, True],
    extra={"deep": {"a": [1] * 60}},
)


@pytest.mark.parametrize(
    "episode",
    [
        build_episode(1, 2, global_step=3),
        build_episode(
            trajectories=(build_parallel_record(),), scores=(TrajectoryScore(value=0.5, at=Placement.LAST_TOKEN),)
        ),
        several_records(2),
        failed_episode(3),
        build_episode(text=HOSTILE, reward=None),
    ],
)
def test_every_episode_is_rebuilt(tmp_path, episode):
    """The source has the task, the messages, the scores, the lineage and the fault of the episode."""
    found = run_case(source_of(tmp_path, episode))

    for name in ("task", "rollout_n", "global_step", "status", "fault", "messages", "scores", "lineage", "objective"):
        assert getattr(found, name) == getattr(episode, name)
    assert len(found.trajectories) == len(episode.trajectories)


def test_hostile_values_stay_values(tmp_path):
    """Quotes, escapes and half surrogate pairs in any field are literals; numbers that JSON has not are read again."""
    source = source_of(tmp_path, evolve(build_episode(text=HOSTILE), task=ODD))

    assert run_case(source).task.ground_truth == ODD.ground_truth
    assert "from math import inf" in source
    assert "\u202e" not in source


@pytest.mark.slow
def test_it_runs_with_pytest_and_can_fail(tmp_path):
    """The source is a file for pytest, and a changed token makes it fail."""
    source = source_of(tmp_path, build_episode())
    changed = source.replace("'position_ids': [0, 1, 2, 3", "'position_ids': [0, 1, 2, 4")
    assert changed != source
    for text, code in ((source, 0), (changed, 1)):
        file = tmp_path / "test_copied.py"
        file.write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)], cwd=tmp_path)
        assert done.returncode == code
