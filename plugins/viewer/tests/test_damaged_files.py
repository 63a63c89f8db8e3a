"""A damaged file of a run costs the pages no more than its own content, and a page names the file and the line."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from viewer_runs import build_episode, build_record, write_run, write_step, write_trace

from turnwise.cli import main
from turnwise_viewer.training_metrics import read_series

GOOD = [{"step": step, "reward/mean": step / 10, "length/mean": 50 + step} for step in range(1, 4)]
ROUTES = ["episodes", "groups", "metrics", "timeline", "running"]
READERS = {
    "metrics.jsonl": {"metrics"},
    "trace.json": {"timeline"},
    "running.json": {"running"},
    "config.resolved.yaml": set(),
}
"""The routes that read a file; each file of episodes is read by all others."""
EPISODES = {"episodes", "groups", "timeline"}


def write_all(folder: Path, episodes: str) -> Path:
    """Write a run with every file that the viewer reads, and return its file of episodes."""
    if episodes == "steps":
        for step in (1, 2):
            write_step(folder, step, [build_episode(step)], 0.5)
        file = folder / "episodes/step-00000002.parquet"
    else:
        write_run(folder, [build_episode(task) for task in range(3)], name=episodes.removesuffix(".partial"))
        file = folder / episodes
        if episodes.endswith(".jsonl.partial"):
            (folder / "trajectories.jsonl").rename(file)
    write_trace(folder, ("episode", 0.0, 1.0, {"uid": "task-0000/0"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in GOOD))
    (folder / "running.json").write_text("{}")
    (folder / "config.resolved.yaml").write_text("engine: x\nagent: y\n")
    return file


def replace_line(text: bytes) -> Callable[[Path], object]:
    """Return a change that replaces the second line of a file, or the file if it has one line."""

    def change(file: Path) -> None:
        lines = file.read_bytes().split(b"\n")
        lines[min(1, max(0, len(lines) - 2))] = text
        file.write_bytes(b"\n".join(lines))

    return change


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "empty": lambda file: file.write_bytes(b""),
    "binary": replace_line(b"\x00\xff\xfe{\x80"),
    "NaN": replace_line(b"NaN"),
    "infinite": replace_line(b'{"step": Infinity, "reward/mean": 1e999}'),
    "huge": replace_line(b'{"step": 2, "reward/mean": 1' + b"0" * 400 + b"}"),
    "long number": replace_line(b'{"step": 2, "reward/mean": 1' + b"0" * 5000 + b"}"),
    "list": replace_line(b"[1, 2]"),
    "other types": replace_line(b'{"step": "x", "traceEvents": 3, "uid": []}'),
    "deep": replace_line(b"[" * 100_000),
    "half a pair": replace_line(b'{"step": 2, "\\ud800": 1}'),
    "null": replace_line(b"null"),
    "removed": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


def answers(client, routes):
    return {name: client.ask(f"api/v1/runs/0/{name}") for name in routes}


@pytest.mark.many_cases
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [*READERS, "trajectories.parquet", "trajectories.jsonl", "steps"])
def test_the_other_pages_stay(tmp_path, serve, name, change):
    """Whatever happens to a file while its page is open, routes of other files answer as before, and none breaks."""
    episodes = name if name not in READERS else "trajectories.parquet"
    file = write_all(tmp_path, episodes)
    if name in READERS:
        file = tmp_path / name
    client = serve(tmp_path)
    before = answers(client, ROUTES)
    assert {200} == {status for status, _body, _headers in before.values()}

    CHANGES[change](file)

    after = answers(client, ROUTES)
    readers = READERS.get(name, EPISODES)
    assert {} == {
        route: after[route] for route in ROUTES if route not in readers and after[route][:2] != before[route][:2]
    }
    for route in readers:
        status, body, _headers = after[route]
        answer = json.loads(body)
        assert status == 200 or (status == 400 and file.name in answer["error"] and "\n" not in answer["error"]), body
    (listed,) = client.get("runs")["runs"]
    assert "\n" not in (listed["error"] or "")
    if after["episodes"][0] == 400:  # the error stays as long as the damage
        assert listed["error"] == json.loads(after["episodes"][1])["error"]


WRONG = {
    "binary": (b"\x00\xff", "line 2: not the metrics of a step: "),
    "cut": (b'{"step": 2, "reward/mean": 0.', "line 2: not the metrics of a step: "),
    "list": (b"[1]", "line 2: not the metrics of a step: "),
    "no step": (b'{"reward/mean": 1}', "line 2: not the metrics of a step: it has no step"),
    "half a step": (b'{"step": 1.5}', "line 2: not the metrics of a step: its step is 1.5"),
    "true": (b'{"step": true}', "line 2: not the metrics of a step: its step is True"),
    "infinite step": (b'{"step": Infinity}', "line 2: not the metrics of a step: its step is inf"),
    "negative step": (b'{"step": -1}', "line 2: not the metrics of a step: its step is -1"),
    "huge step": (b'{"step": 1' + b"0" * 400 + b"}", "line 2: not the metrics of a step: its step is 1000"),
    "text": (b'{"step": 2, "reward/mean": "high", "length/mean": 52}', "line 2: 'reward/mean' is no number"),
    "nested": (b'{"step": 2, "reward/mean": {}, "length/mean": 52}', "line 2: 'reward/mean' is no number"),
    "deep": (b"[" * 100_000, "line 2: not the metrics of a step: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_other_lines_of_metrics_are_shown(tmp_path, serve, capsys, name):
    """One message names the first wrong line, on the page and in an export, and the other lines are drawn."""
    line, expected = WRONG[name]
    lines = [json.dumps(each).encode() for each in GOOD]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], line, lines[2], line, b""]))

    answer = serve(tmp_path).get("runs/0/metrics")

    assert answer["problem"].startswith(f"metrics.jsonl, {expected}"), answer["problem"]
    assert answer["problem"].endswith("; 1 more line is wrong")
    assert answer["series"]["reward/mean"]["steps"][0] == 1
    assert 0.3 in answer["series"]["reward/mean"]["values"]
    assert (52 in answer["series"]["length/mean"]["values"]) == (b"52" in line)
    assert main(["view", str(tmp_path), "--export", str(tmp_path / "page.html")]) == 0
    error = capsys.readouterr().err
    assert f"turnwise: {tmp_path}/{answer['problem']}\n" in error


def test_numbers_that_are_no_points(tmp_path):
    """A number that is not finite is a gap, without a message, and so is one that no float can hold."""
    values = ["NaN", "Infinity", "1e999", "null", "1" + "0" * 400]
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "a": {each}}}\n' for n, each in enumerate(values)))

    read = read_series(tmp_path)

    assert read.series == {"a": {"steps": [0, 1, 2, 3, 4], "values": [None] * 5}}
    assert read.problem is None


def test_a_damaged_step_hides_no_other_step(tmp_path, serve):
    """A file of a step that is no file of episodes is named, and the episodes of the other steps are shown."""
    for number, content in enumerate((b"", b"garbage", None)):
        folder = tmp_path / str(number)
        folder.mkdir()
        file = write_all(folder, "steps")
        file.write_bytes(file.read_bytes()[:-9] if content is None else content)

        client = serve(folder)

        (listed,) = client.get("runs")["runs"]
        assert listed["num_episodes"] == 1
        assert listed["error"].startswith(f"episodes/{file.name}: ")
        assert client.get("runs/0/episodes")["total"] == 1


ODD_REWARDS = [1e308, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), None, 5e-324]


@pytest.mark.parametrize("same_task", [True, False])
def test_rewards_that_no_sum_can_hold(tmp_path, serve, same_task):
    """Rewards whose mean or spread is no finite number give null there, and no warning on the terminal."""
    run = [build_episode(0 if same_task else n, n) for n in range(len(ODD_REWARDS))]
    run.append(build_episode(9, trajectories=(build_record(), build_record()), reward=None))
    file = write_run(tmp_path, run) / "trajectories.parquet"
    table = pq.read_table(file)
    rewards = pa.array([*ODD_REWARDS, float("inf"), float("-inf")], pa.float64())
    pq.write_table(table.set_column(table.column_names.index("reward"), table.schema.field("reward"), rewards), file)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = serve(tmp_path)
        groups = client.get("runs/0/groups", sort="spread")["groups"]
        assert client.get("runs/0/groups", sort="mean")["total"] == len(groups) == (2 if same_task else 9)
        assert client.get("runs/0/episodes", sort="reward", min_reward=0)["total"] >= 3
        assert main(["view", str(tmp_path), "--export", str(tmp_path / "page.html")]) == 0
    assert [str(each.message) for each in caught if "numpy" in each.filename or "viewer" in each.filename] == []
    finite = [group for group in groups if group["mean"] is not None]
    assert len(finite) == (0 if same_task else 4)
