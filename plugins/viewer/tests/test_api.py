"""The JSON API over HTTP."""

import json
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from viewer_runs import (
    HOSTILE,
    build_episode,
    build_parallel_record,
    failed_episode,
    several_records,
    write_run,
    write_step,
)

from turnwise.record.result import token_scores
from turnwise.types import Placement, Status, TokenScore, TrajectoryScore, TurnScore
from turnwise_result_files import TrajectoryWriter
from turnwise_result_files import trajectories as writer_module
from turnwise_result_files.running_episodes import RUNNING_FILE
from turnwise_testing.inputs.strategies import trajectories
from turnwise_viewer.episode_index import COLUMNS
from turnwise_viewer.row_groups import _StreamGroups
from turnwise_viewer.run_folder import RunFolder


def keys(answer):
    return [each["key"] for each in answer["episodes"]]


def test_runs_are_listed(tmp_path, serve):
    """The list has every run with its episodes, and the version of the API."""
    first = write_run(tmp_path / "a", [build_episode(task) for task in range(3)])
    second = write_run(tmp_path / "b", [build_episode()], name="trajectories.jsonl")

    answer = serve(first, second).get("runs")

    assert answer["version"] == 1
    assert [(run["name"], run["num_episodes"], run["is_partial"]) for run in answer["runs"]] == [
        ("a", 3, False),
        ("b", 1, False),
    ]


@pytest.mark.parametrize("name", ["trajectories.parquet", "trajectories.jsonl"])
def test_episodes_have_numbers(tmp_path, serve, name):
    """An episode of the list has its status, reward, lengths and tool calls, in both formats."""
    client = serve(write_run(tmp_path, [build_episode(4, 2), failed_episode(5), several_records(6)], name=name))

    one, failed, several = client.get("runs/0/episodes")["episodes"]

    assert (one["key"], one["status"], one["reward"], one["num_tool_calls"]) == ("task-0004/2", "completed", 1.0, 1)
    assert (one["prompt_tokens"], one["action_tokens"], one["response_tokens"]) == (3, 3, 5)
    assert (failed["reward"], failed["num_records"], failed["fault_owner"]) == (None, 0, "tool")
    assert (several["reward"], several["num_records"]) == (1.75, 2)


def test_pages_cover_every_episode_once(tmp_path, serve):
    """Pages of a sorted list have every episode exactly once, and the total is on each page."""
    client = serve(write_run(tmp_path, [build_episode(task, reward=task % 3) for task in range(23)]))
    sort = {"sort": "reward", "order": "desc", "limit": 5}

    pages = [client.get("runs/0/episodes", offset=offset, **sort) for offset in range(0, 25, 5)]

    found = [each for page in pages for each in page["episodes"]]
    assert {page["total"] for page in pages} == {23}
    assert sorted(each["key"] for each in found) == [f"task-{task:04d}/0" for task in range(23)]
    assert [each["reward"] for each in found] == sorted((each["reward"] for each in found), reverse=True)


def test_episodes_without_a_value_come_last(tmp_path, serve):
    """An unscored episode is last in either order of the reward."""
    client = serve(write_run(tmp_path, [failed_episode(0), build_episode(1), build_episode(2, reward=0.0)]))

    for order in ("asc", "desc"):
        assert keys(client.get("runs/0/episodes", sort="reward", order=order))[-1] == "task-0000/0"


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"status": "failed"}, [3]),
        ({"status": ["failed", "truncated"]}, [2, 3]),
        ({"min_reward": 0.5}, [1]),
        ({"max_reward": 0.5}, [0, 2]),
        ({"tools": "unused"}, [0, 3]),
        ({"tools": "used"}, [1, 2]),
        ({"tools": "errors"}, [1]),
        ({"uid": "task-0002"}, [2]),
        ({"q": "the ANSWER of task 1"}, [1]),
        ({"q": "question", "status": "truncated"}, [2]),
        ({"q": "in no episode"}, []),
        ({"step": 7}, []),
    ],
)
def test_filters(tmp_path, serve, conditions, expected):
    """Each condition keeps the episodes for which it holds."""
    run = [
        build_episode(0, reward=0.0),
        build_episode(1, reward=1.0),
        build_episode(2, reward=0.0, status=Status.TRUNCATED),
        failed_episode(3),
    ]
    client = serve(write_run(tmp_path, run))

    assert keys(client.get("runs/0/episodes", **conditions)) == [f"task-{task:04d}/0" for task in expected]


def test_search_finds_text_of_every_record_and_quote(tmp_path, serve):
    """A search finds text with quotes and backslashes, and is complete when it says so."""
    odd = 'C:\\path "quoted" line\nnext'
    client = serve(write_run(tmp_path, [build_episode(task, text=odd if task == 9 else "plain") for task in range(12)]))

    for text in ('"quoted"', "C:\\path", "line\nnext"):
        answer = client.get("runs/0/episodes", q=text)
        while answer["searched"] < 1:
            answer = client.get("runs/0/episodes", q=text)
        assert keys(answer) == ["task-0009/0"]


def test_steps_of_a_training_are_told_apart(tmp_path, serve):
    """Episodes of one task at several steps, and held-out ones, have different keys."""
    run = [
        build_episode(0, global_step=1),
        build_episode(0, global_step=2, reward=0.0),
        build_episode(0, global_step=2, validation=True),
    ]
    client = serve(write_run(tmp_path, run))

    names = ["task-0000/0@1", "task-0000/0@2", "task-0000/0@2-held-out"]
    assert keys(client.get("runs/0/episodes")) == names
    assert keys(client.get("runs/0/episodes", step=2, validation="false")) == names[1:2]
    assert client.get("runs/0/episode", key=names[1])["reward"] == 0.0
    assert client.get("runs/0/groups")["total"] == 3


def test_an_episode_has_everything(tmp_path, serve):
    """An episode has its task, messages, records with reasons, and scores with their places."""
    client = serve(write_run(tmp_path, [build_episode(1), several_records(2), failed_episode(3)]))

    episode = client.get("runs/0/episode", key="task-0002/0")
    first, second = episode["records"]
    failed = client.get("runs/0/episode", key="task-0003/0")

    assert episode["task"]["ground_truth"] == "2"
    assert [message["role"] for message in episode["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert second["lineage"]["label"] == "history was rewritten"
    assert first["turns"] == [[3, 5], [7, 8]]
    assert first["score"]["credits"] == [[4, 0.25], [7, 0.5]]
    assert second["score"]["credits"] == [[7, 1.0]]
    assert failed["records"] == []
    assert failed["fault"]["message"] == "no such file"


def test_tokens_are_columns(tmp_path, serve):
    """Every token has id, origin, mask, log-probability, weight version and position."""
    client = serve(write_run(tmp_path, [build_episode(1)]))

    tokens = client.get("runs/0/tokens", key="task-0001/0")

    assert tokens["ids"] == [1, 2, 3, 5, 6, 7, 8, 9]
    assert [tokens["origin_names"][each] for each in tokens["origins"]] == (
        ["prompt"] * 3 + ["action"] * 2 + ["observation"] * 2 + ["action"]
    )
    assert tokens["mask"] == [0, 0, 0, 1, 1, 0, 0, 1]
    assert tokens["logprobs"] == [None] * 3 + [-0.5, -0.5, None, None, -1.25]
    assert tokens["weight_versions"] == [None] * 3 + [3, 3, None, None, 4]
    assert tokens["position_ids"] == list(range(8))
    assert tokens["pieces"] is None
    assert "no config" in tokens["no_pieces_because"]


def test_paths_have_their_layout(tmp_path, serve):
    """The layout of parallel paths arrives as it was recorded."""
    record = build_parallel_record()
    client = serve(write_run(tmp_path, [build_episode(trajectories=(record,))]))

    tokens = client.get("runs/0/tokens", key="task-0000/0")
    segments = client.get("runs/0/episode", key="task-0000/0")["records"][0]["segments"]

    assert tokens["position_ids"] == record.position_ids.tolist()
    assert tokens["block_start"] == record.block_start.tolist()
    assert tokens["path_start"] == record.path_start.tolist()
    assert [(each["block"], each["path"]) for each in segments] == [(-1, -1), (0, 0), (0, 1), (-1, -1)]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    record=trajectories(max_steps=5),
    level=st.sampled_from(["last_action", "last_token", "turn", "token"]),
    value=st.floats(-8, 8, width=32),
)
def test_credits_are_the_scores_of_the_trainer(tmp_path_factory, serve, record, level, value):
    """The credited tokens are the ones to which the core gives the score, for every record."""
    if level == "turn":
        score = TurnScore(values=(value,) * len(record.turns()))
    elif level == "token":
        score = TokenScore(values=tuple(value * mask for mask in record.response_mask.tolist()))
    else:
        score = TrajectoryScore(value=value, at=Placement(level))
    folder = write_run(tmp_path_factory.mktemp("run"), [build_episode(trajectories=(record,), scores=(score,))])

    credited = serve(folder).get("runs/0/episode", key="task-0000/0")["records"][0]["score"]["credits"]

    expected = token_scores(score, record)
    found = np.zeros_like(expected)
    for place, each in credited:
        found[place - record.num_prompt_tokens] = each
    # The core adds the values of turns with one end in float32, and the page adds them in float64.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)


def test_groups(tmp_path, serve):
    """A group has its mean, its spread, each episode's difference from the mean, and a mark without variance."""
    run = [build_episode(task, n, reward=float(n == 0 and task == 1)) for task in range(2) for n in range(4)]
    client = serve(write_run(tmp_path, run))

    best = client.get("runs/0/groups", sort="spread")["groups"][0]
    flat = client.get("runs/0/groups", uid="task-0000")["groups"][0]

    assert (best["uid"], best["mean"], best["max"] - best["min"]) == ("task-0001", 0.25, 1.0)
    assert [each["difference"] for each in best["episodes"]] == [0.75, -0.25, -0.25, -0.25]
    assert (best["no_variance"], flat["no_variance"]) == (False, True)


def test_a_run_in_progress_is_readable(tmp_path, serve):
    """Episodes appear while the writer writes, and the run keeps its episodes when the file gets its name."""
    writer = TrajectoryWriter(tmp_path / "trajectories.parquet", rows_per_group=2)
    for task in range(4):
        writer.write(build_episode(task))
    client = serve(tmp_path)
    before = client.get("runs")["runs"][0]
    assert before | {"path": "", "revision": ""} == {
        "name": tmp_path.name,
        "path": "",
        "num_episodes": 4,
        "is_partial": True,
        "num_running": 0,
        "running_revision": "",
        "has_metrics": False,
        "has_trace": False,
        "has_started": True,
        "revision": "",
        "error": None,
    }

    for task in range(4, 8):
        writer.write(build_episode(task))
    assert client.get("runs/0/episodes")["total"] == 8
    assert client.get("runs")["runs"][0]["revision"] != before["revision"]
    assert client.get("runs/0/episode", key="task-0006/0")["task"]["ground_truth"] == "6"

    writer.close()
    assert client.get("runs/0/episodes")["total"] == 8
    assert client.get("runs")["runs"][0]["is_partial"] is False


def test_the_index_of_a_run_in_progress_decodes_each_column_once(tmp_path, monkeypatch):
    """A look at new batches decodes the columns of the index once, one more for their number of rows, and no tokens."""
    decoded = []
    decode = _StreamGroups._decode
    monkeypatch.setattr(
        _StreamGroups,
        "_decode",
        lambda self, message, columns: decoded.append(sorted(columns)) or decode(self, message, columns),
    )
    with TrajectoryWriter(tmp_path / "trajectories.parquet", rows_per_group=2) as writer:
        for task in range(4):
            writer.write(build_episode(task))
        writer.flush()
        run = RunFolder.open(tmp_path)
        num_batches = len(run.index.row_of_group) - 1
        assert decoded == [["validation"]] * num_batches + [sorted(COLUMNS)] * num_batches
        assert run.episode("task-0003/0")["task"]["ground_truth"] == "3"
        run.close()


def test_running_episodes_are_told_with_their_seconds(tmp_path, serve):
    """The running episodes of a folder have their seconds so far; without a running run there are none."""
    client = serve(write_run(tmp_path, [build_episode()]))
    assert client.get("runs/0/running") == {"total": 0, "episodes": []}
    before = client.get("runs")["runs"][0]

    now = time.time()
    episode = {"key": "a/1", "agent_name": "x", "worker": "w", "num_turns": 2, "num_tokens": 9, "last": "tool t"}
    times = {"started_at": now - 100, "last_at": now - 10}
    # In the future: an old file is of a killed run, and this test may wait for a processor.
    state = {"written_at": now + 3600, "total": 7, "episodes": [episode | times]}
    (tmp_path / RUNNING_FILE).write_text(json.dumps(state))

    answer = client.get("runs/0/running")
    assert answer["total"] == 7
    (found,) = answer["episodes"]
    assert found | {"seconds": 0, "last_s": 0} == episode | {"seconds": 0, "last_s": 0}
    assert 0 <= found["last_s"] - 10 == pytest.approx(found["seconds"] - 100)
    after = client.get("runs")["runs"][0]
    assert after["num_running"] == 7
    assert after["running_revision"] != before["running_revision"]


def test_a_run_that_breaks_leaves_the_others(tmp_path, serve):
    """A run whose file is replaced by something else is listed with its error, and the other run stays readable."""
    good, bad = (write_run(tmp_path / name, [build_episode()]) for name in ("good", "bad"))
    client = serve(good, bad)
    (bad / "trajectories.parquet").unlink()
    (bad / "trajectories.parquet").write_text("something else")

    runs = client.get("runs")["runs"]

    assert runs[0]["error"] is None
    assert "cannot be read" in runs[1]["error"]
    assert client.error("runs/1/episodes")[0] == 400
    assert client.get("runs/0/episodes")["total"] == 1


def test_a_killed_run_is_readable(tmp_path, serve, monkeypatch):
    """A partial file with half a batch at its end has the whole batches."""
    monkeypatch.setattr(writer_module, "_FLUSH_S", 3600.0)  # a timer could write a batch of one episode
    writer = TrajectoryWriter(tmp_path / "trajectories.parquet", rows_per_group=2)
    for task in range(6):
        writer.write(build_episode(task))
    writer.flush()
    partial = tmp_path / "trajectories.parquet.partial"
    killed = tmp_path / "killed" / partial.name
    killed.parent.mkdir()
    killed.write_bytes(partial.read_bytes()[:-100])
    writer.close()

    assert serve(killed.parent).get("runs/0/episodes")["total"] == 4


def test_a_training_has_the_episodes_of_its_steps(tmp_path, serve):
    """The episodes of all steps are one list; each has its step, its advantages, and a unique key."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    write_step(tmp_path, 1, [build_episode(task, n, reward=float(n)) for task in range(3) for n in range(2)], 0.5)
    client = serve(tmp_path)
    assert client.get("runs/0/episodes")["total"] == 6
    write_step(tmp_path, 2, [build_episode(0, n, global_step=1) for n in range(2)], -0.25)

    assert keys(client.get("runs/0/episodes", step=2)) == ["task-0000/0@2", "task-0000/1@2"]
    assert client.get("runs/0/episodes", q="answer of task 2")["total"] == 2
    group = client.get("runs/0/groups", step=2)["groups"][0]
    assert [each["advantage"] for each in group["episodes"]] == [-0.25, -0.25]
    tokens = client.get("runs/0/tokens", key="task-0002/1@1")
    assert tokens["advantages"] == [None] * 3 + [0.5, 0.5, 0.0, 0.0, 0.5]
    episode = client.get("runs/0/episode", key="task-0000/0@2")
    assert (episode["global_step"], episode["asked_at_step"]) == (2, 1)


def test_a_training_that_is_resumed_replaces_its_steps(tmp_path, serve):
    """Steps that a resumed training removed and wrote again replace the ones before."""
    (tmp_path / "metrics.jsonl").write_text("")
    for step in (1, 2):
        write_step(tmp_path, step, [build_episode(step)], 1.0)
    client = serve(tmp_path)
    assert keys(client.get("runs/0/episodes")) == ["task-0001/0@1", "task-0002/0@2"]

    (tmp_path / "episodes/step-00000002.parquet").unlink()
    write_step(tmp_path, 2, [build_episode(7), build_episode(8)], 1.0)

    assert keys(client.get("runs/0/episodes")) == ["task-0001/0@1", "task-0007/0@2", "task-0008/0@2"]


def test_odd_text_arrives_unchanged(tmp_path, serve):
    """Markup, half surrogate pairs and control characters of a model arrive as JSON text."""
    client = serve(write_run(tmp_path, [build_episode(text=HOSTILE)]))

    status, body, headers = client.ask("api/v1/runs/0/episode", key="task-0000/0")

    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "application/json")
    assert body.isascii()
    assert json.loads(body)["messages"][-1]["content"] == HOSTILE


def test_metrics_are_series(tmp_path, serve):
    """Metrics of steps and validations are series; half a line at the end is left out."""
    write_run(tmp_path, [build_episode()])
    lines = ['{"step": 0, "validation/reward/mean": 0.5}', '{"step": 1, "reward/mean": 0.25, "noise/scale": null}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2, "rew']))

    series = serve(tmp_path).get("runs/0/metrics")["series"]

    assert series == {
        "validation/reward/mean": {"steps": [0], "values": [0.5]},
        "reward/mean": {"steps": [1], "values": [0.25]},
        "noise/scale": {"steps": [1], "values": [None]},
    }


@pytest.mark.parametrize(
    ("path", "parameters", "status", "text"),
    [
        ("runs/1/episodes", {}, 404, "there is no run '1'"),
        ("runs/x/episodes", {}, 404, "there is no run 'x'"),
        ("runs/0/episodes", {"sort": "size"}, 400, "sort: 'size' is none of"),
        ("runs/0/episodes", {"order": "up"}, 400, "neither asc nor desc"),
        ("runs/0/episodes", {"status": "done"}, 400, "'done' is none of completed"),
        ("runs/0/episodes", {"limit": "1000"}, 400, "more than 500"),
        ("runs/0/episodes", {"offset": "-1"}, 400, "not a whole number"),
        ("runs/0/episodes", {"min_reward": "nan"}, 400, "not a number"),
        ("runs/0/episodes", {"tools": "many"}, 400, "none of used, unused, errors"),
        ("runs/0/episodes", {"validation": "yes"}, 400, "neither true nor false"),
        ("runs/0/episode", {}, 400, "parameter 'key' is missing"),
        ("runs/0/episode", {"key": "other/0"}, 400, "no episode 'other/0'"),
        ("runs/0/tokens", {"key": "task-0000/0", "record": 1}, 400, "has no record 1"),
        ("runs/0/groups", {"sort": "size"}, 400, "none of order, mean, spread"),
        ("runs/0/timeline", {"step": "first"}, 400, "not a number"),
        ("runs/0/timeline", {"key": "other/0"}, 400, "no episode 'other/0'"),
        ("runs/0/nothing", {}, 404, "Not Found"),
    ],
)
def test_bad_requests_get_one_line(tmp_path, serve, path, parameters, status, text):
    """A bad request gets a status and one line that names the value."""
    found, error = serve(write_run(tmp_path, [build_episode()])).error(path, **parameters)

    assert (found, "\n" in error) == (status, False)
    assert text in error
