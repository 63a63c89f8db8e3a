"""The log of metrics survives kills and resumes, and reaches the observers of the run."""

from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise_grpo_trainer.report.metric_log import METRICS_FILE, MetricLog, read_metrics

LINES = st.lists(
    st.tuples(st.integers(0, 9), st.dictionaries(st.sampled_from(["a", "b/c"]), st.floats(), max_size=2)), max_size=6
)


def write(folder, lines, from_step=None, **options):
    """Log some lines in one process."""
    log = MetricLog(folder, **options)
    log.start(from_step=from_step)
    for step, metrics in lines:
        log.write(step, metrics)


@given(lines=LINES)
def test_metrics_are_read_as_they_were_written(tmp_path_factory, lines):
    """Lines come back in order and exactly; values that JSON cannot hold are None."""
    folder = tmp_path_factory.mktemp("log")
    write(folder, lines)

    assert read_metrics(folder) == [
        {"step": step, **{name: value if math.isfinite(value) else None for name, value in metrics.items()}}
        for step, metrics in lines
    ]


@given(lines=LINES, cut=st.integers(0, 400))
def test_a_kill_costs_at_most_the_last_line(tmp_path_factory, lines, cut):
    """However much of the file was written, the complete lines are read."""
    folder = tmp_path_factory.mktemp("log")
    write(folder, lines)
    whole = (folder / METRICS_FILE).read_bytes()
    kept = whole[:cut]
    (folder / METRICS_FILE).write_bytes(kept)

    assert len(read_metrics(folder)) == kept.count(b"\n")


def test_a_resume_removes_later_steps(tmp_path):
    """Lines after the checkpoint's step, which a killed process wrote, are replaced by the resumed ones."""
    write(tmp_path, [(0, {"v": 0.0}), (1, {"v": 1.0}), (2, {"v": 2.0}), (2, {"w": 2.5}), (3, {"v": 3.0})])

    write(tmp_path, [(3, {"v": -3.0})], from_step=2)

    assert [(0, 0.0), (1, 1.0), (2, 2.0), (2, None), (3, -3.0)] == [
        (line["step"], line.get("v")) for line in read_metrics(tmp_path)
    ]


def test_a_kill_at_the_start_of_a_resume_keeps_the_log(tmp_path, monkeypatch):
    """The log is replaced as a whole: before that, it has all lines."""
    write(tmp_path, [(1, {"v": 1.0}), (2, {"v": 2.0})])

    def killed(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            MetricLog(tmp_path).start(from_step=1)

    assert [1, 2] == [line["step"] for line in read_metrics(tmp_path)]


def test_a_new_training_starts_an_empty_log(tmp_path):
    """Without a step to resume from, earlier lines are removed."""
    write(tmp_path, [(1, {"v": 1.0})])
    write(tmp_path, [])

    assert [] == read_metrics(tmp_path)


def test_lines_up_to_a_step(tmp_path):
    """`up_to` includes its step, and excludes later ones."""
    write(tmp_path, [(step, {}) for step in (1, 2, 3)])

    assert [1, 2] == [line["step"] for line in read_metrics(tmp_path, up_to=2)]


def test_no_log(tmp_path):
    """A folder without a log has no metrics."""
    assert [] == read_metrics(tmp_path)


def test_a_file_that_is_no_log(tmp_path):
    """A line that is not JSON is an error that names the file, not a skipped line."""
    (tmp_path / METRICS_FILE).write_text('{"step": 1}\nhello\n')

    with pytest.raises(ConfigError, match=r"metrics\.jsonl: not the metrics of a training"):
        read_metrics(tmp_path)


def test_observers_receive_every_line(tmp_path):
    """The start has folder, settings and whether the training is resumed; each line has its exact values."""
    events = []
    lines = [(1, {"v": math.inf}), (2, {"v": 2.0})]

    write(tmp_path, lines, from_step=0, emit=lambda name, event: events.append((name, event)), settings={"lr": 1})

    (name, started), *logged = events
    assert ("on_training_started", tmp_path, {"lr": 1}, True) == (
        name,
        started.folder,
        started.settings,
        started.resumed,
    )
    assert lines == [(event.step, event.values) for _, event in logged]
    assert {"on_metrics_logged"} == {name for name, _ in logged}


def test_a_line_is_in_the_file_before_observers_receive_it(tmp_path):
    """An observer that ends the process loses no line."""

    def emit(name, _event):
        if name == "on_metrics_logged":
            assert {"step": 1, "v": 1.0} == json.loads((tmp_path / METRICS_FILE).read_text())

    write(tmp_path, [(1, {"v": 1.0})], emit=emit)
