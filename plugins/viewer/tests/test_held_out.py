"""Held-out episodes of a training, which are in files beside those of its steps."""

from viewer_runs import build_episode, write_step

from turnwise_result_files import TrajectoryWriter


def test_held_out_episodes_are_beside_those_of_the_steps(tmp_path, serve):
    """A training lists the episodes of its validations; no step learned from them, so they have no advantages."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    for step in (0, 1):
        if step:
            write_step(tmp_path, step, [build_episode(0, n, global_step=1) for n in range(2)], 0.5)
        with TrajectoryWriter(tmp_path / f"episodes/validation-{step:08d}.parquet") as writer:
            for task in (7, 8):
                writer.write(build_episode(task, validation=True, global_step=step))
    client = serve(tmp_path)

    episodes = client.get("runs/0/episodes")["episodes"]

    assert [each["key"] for each in episodes] == [
        *("task-0007/0-held-out", "task-0008/0-held-out", "task-0000/0@1", "task-0000/1@1"),
        *("task-0007/0@1-held-out", "task-0008/0@1-held-out"),
    ]
    held_out = client.get("runs/0/episodes", validation="true", step=1)
    assert held_out["total"] == 2
    assert client.get("runs/0/episodes", q="answer of task 8")["total"] == 2
    assert client.get("runs/0/tokens", key="task-0008/0@1-held-out")["advantages"] is None
    groups = client.get("runs/0/groups", step=1)["groups"]
    assert [each["validation"] for each in groups] == [False, True, True]
    assert [each["advantage"] for each in groups[1]["episodes"]] == [None]
    assert client.get("runs/0/episode", key="task-0007/0-held-out")["global_step"] == 0
