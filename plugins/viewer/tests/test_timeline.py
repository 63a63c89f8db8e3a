"""The timeline of the API: slices of a trace, named by the episodes of the run."""

import pytest
from viewer_runs import build_episode, run_command, write_run, write_trace


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
