"""The timeline of the API: slices of a trace, named by the episodes of the run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_runs import build_episode, run_command, write_run, write_trace

from turnwise_viewer.timeline_bounds import MOST_ROWS, MOST_SLICES, bound
from turnwise_viewer.trace_slices import CATEGORIES


def keys_of(timeline):
    """Return the keys of the episodes that a timeline shows."""
    return {each[4] for row in timeline["rows"] for each in row["slices"]}


def test_a_timeline_has_rows(tmp_path, serve):
    """The slices are rows of workers and replicas, in seconds from the first; an unknown episode has no key."""
    write_run(tmp_path, [build_episode()])
    write_trace(tmp_path, ("episode", 2, 0.5, {"uid": "task-0000/0"}), ("episode", 3, 1, {"uid": "aborted/0"}))

    assert serve(tmp_path).get("runs/0/timeline")["timeline"] == {
        "seconds": 2.0,
        "rows": [
            {
                "name": "worker 0",
                "slot": 1,
                "slices": [[0.0, 0.5, "episode", "episode", "task-0000/0"], [1.0, 1.0, "episode", "episode", None]],
            }
        ],
        "longest": [1.0, 1.0, "episode", "episode", None],
        "num_merged": 0,
        "num_hidden_rows": 0,
    }


def test_an_episode_has_its_own_timeline(tmp_path, serve):
    """The timeline of an episode has its slices, and the updates of weights that came between them."""
    write_run(tmp_path, [build_episode(0), build_episode(1)])
    mine, other = {"uid": "task-0001/0"}, {"uid": "task-0000/0"}
    write_trace(
        tmp_path,
        *(("episode", 1, 9, other), ("episode", 3, 4, mine), ("tool", 4, 1, mine)),
        *(("memory", 0, 2, {"version": 1}), ("memory", 5, 1, {"version": 2}), ("memory", 8, 1, {"version": 3})),
    )

    timeline = serve(tmp_path).get("runs/0/timeline", key="task-0001/0")["timeline"]

    assert timeline["seconds"] == 4.0
    (row,) = timeline["rows"]
    assert [(each[0], each[2]) for each in row["slices"]] == [(0.0, "episode"), (1.0, "tool"), (2.0, "memory")]


def test_a_trace_without_the_newest_step_is_shown_whole(tmp_path, serve):
    """A trace that names no episode of the newest step, as those of earlier versions, is there and not empty."""
    write_run(tmp_path, [build_episode(0, global_step=2)])
    write_trace(tmp_path, ("episode", 2, 0.5, {"uid": "task-0000/0"}))
    client = serve(tmp_path)

    (row,) = client.get("runs/0/timeline", step="last")["timeline"]["rows"]

    assert row["slices"] == [[0.0, 0.5, "episode", "episode", None]]
    assert client.get("runs/0/timeline", step=2)["timeline"]["rows"] == []


def test_a_long_timeline_is_bounded(tmp_path, serve):
    """Of 30,000 slices the short neighbours are blocks that say their number; the longest episode stays a slice."""
    write_run(tmp_path, [build_episode()])
    mine = {"uid": "task-0000/0"}
    calls = [("tool", number / 10, 0.05, {"uid": f"task-{number % 2:04d}/0"}) for number in range(30_000)]
    write_trace(tmp_path, ("episode", 100, 0.5, mine), ("generate", 0, 3000, mine), *calls)

    timeline = serve(tmp_path).get("runs/0/timeline")["timeline"]

    (row,) = timeline["rows"]
    blocks = [each for each in row["slices"] if len(each) > 5]
    assert len(row["slices"]) <= MOST_SLICES
    assert sum(each[5] for each in blocks) == timeline["num_merged"] == 30_000
    assert {"30 tool slices", None} == {value for each in blocks for value in each[3:5]}
    assert [100.0, 0.5, "episode", "episode", "task-0000/0"] == timeline["longest"]
    assert timeline["longest"] in row["slices"]
    assert [0.0, 3000.0, "generate", "generate", "task-0000/0"] in row["slices"]
    assert serve(tmp_path).get("runs/0/timeline", key="task-0000/0")["timeline"]["num_merged"] == 15_000


def test_a_timeline_of_many_rows_keeps_the_longest_of_each_worker():
    """Of 900 rows, those with the longest slices of each worker and replica are there, in order."""
    rows = [
        {"name": name, "slot": slot, "slices": [[0.0, slot * length, kind, kind, None]]}
        for name, kind, length in (
            ("worker 0", "episode", 1.0),
            ("worker 1", "episode", 9.0),
            ("replica 0", "generate", 0.1),
        )
        for slot in range(300)
    ]

    timeline = bound({"seconds": 2700.0, "rows": rows})

    names = [row["name"] for row in timeline["rows"]]
    assert len(names) == MOST_ROWS
    assert timeline["num_hidden_rows"] == 900 - MOST_ROWS
    assert names == sorted(names, key=["worker 0", "worker 1", "replica 0"].index)
    for name in ("worker 0", "worker 1", "replica 0"):
        slots = [row["slot"] for row in timeline["rows"] if row["name"] == name]
        assert len(slots) >= MOST_ROWS // 3
        assert slots == list(range(300 - len(slots), 300))


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 100), st.sampled_from(CATEGORIES), st.sampled_from(["a", "b", None])),
        min_size=1,
        max_size=60,
    ),
    st.integers(7, 20),
)
def test_a_block_covers_its_slices(slices, most):
    """Whatever the times, the bound holds, no slice is lost, and each is covered by one of its row and category."""
    row = sorted([[start, length, kind, kind, key] for start, length, kind, key in slices], key=lambda each: each[0])
    seconds = max(start + length for start, length, _kind, _key in slices)
    whole = {"seconds": seconds, "rows": [{"name": "worker 0", "slot": 1, "slices": row}]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turnwise_viewer.timeline_bounds.MOST_SLICES", most)
        timeline = bound(whole)

    (bounded,) = timeline["rows"]
    shown = bounded["slices"]
    assert len(shown) <= most
    assert sum(each[5] if len(each) > 5 else 1 for each in shown) == len(row)
    for start, length, kind, _name, key in row:
        assert any(
            each[0] <= start
            and each[0] + each[1] >= start + length - 1e-9
            and each[2] == kind
            and each[4] in (key, None)
            for each in shown
        )


def test_a_trace_without_finite_times_is_refused(tmp_path, serve):
    """Python's reader of JSON takes NaN, which would be at no place of a timeline."""
    write_run(tmp_path, [build_episode()])
    write_trace(tmp_path, ("tool", 0, float("nan"), {"uid": "task-0000/0"}))

    _status, error = serve(tmp_path).error("runs/0/timeline")

    assert "not a trace of turnwise" in error


@pytest.mark.slow
def test_the_slices_of_a_training_name_its_episodes(tmp_path, serve):
    """In a real training each slice has the key of its episode, whose step tells apart the episodes of one task."""
    out = tmp_path / "run"
    short = ["train.num_steps=2", "train.tasks_per_step=2", "train.validation.limit=2", "data.limit=2"]
    trace = f"observers=[{{name: trace_file, path: {out / 'trace.json'}}}]"
    run_command("train", "examples/train_calculator.yaml", *short, trace, "--out", str(out))
    client = serve(out)
    keys = {each["key"] for each in client.get("runs/0/episodes", limit=500)["episodes"]}
    of_step = {each["key"] for each in client.get("runs/0/episodes", step=1)["episodes"]}

    assert keys_of(client.get("runs/0/timeline")["timeline"]) == keys | {None}
    assert keys_of(client.get("runs/0/timeline", step=1)["timeline"]) - {None} == of_step
    newest = client.get("runs/0/timeline", step="last")["timeline"]
    assert newest == client.get("runs/0/timeline", step=2)["timeline"]
    one = min(of_step)
    assert keys_of(client.get("runs/0/timeline", key=one)["timeline"]) - {None} == {one}
