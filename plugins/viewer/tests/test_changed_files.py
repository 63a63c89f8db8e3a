"""Files of a run that another program has changed: a page shows what it can, and an export ends in one line."""

import json

import pytest
from viewer_runs import build_episode, write_run

from turnwise.cli import main

NOW = 4e9
"""A time that is never past: each process of the tests must see the same names of cases."""
ODD_CALLS = [None, [None], "x", {"a": 1}, [[]], ["x"], 3, [{}], [{"function": 3}], [{"function": {"name": 5}}], [3, {}]]


RUNNING = {"key": "u/0", "agent_name": "a", "worker": "w", "started_at": 1.0, "num_turns": 1, "num_tokens": 2}
RUNNING |= {"last": "turn", "last_at": 2.0}
CHANGED = [
    *({"written_at": NOW, "episodes": []}, {"total": 1, "episodes": []}, {"written_at": NOW, "total": 1}, [], None, 3),
    *({"written_at": NOW, "total": "x", "episodes": []}, {"written_at": "x", "total": 1, "episodes": []}),
    *({"written_at": NOW, "total": 1, "episodes": each} for each in (None, 3, "x", [None], [[]], [{}])),
    *({"written_at": NOW, "total": 1, "episodes": [RUNNING | {name: []}]} for name in RUNNING),
    *({"written_at": NOW, "total": 1, "episodes": [RUNNING | {"started_at": each}]} for each in (1e999, None, "x")),
]


@pytest.mark.many_cases
@pytest.mark.parametrize("content", CHANGED, ids=repr)
def test_a_changed_file_of_running_episodes_costs_no_page(tmp_path, serve, content):
    """A file that no run writes says nothing: the run is listed with its episodes, and the export is written."""
    run = write_run(tmp_path, [build_episode()])
    (run / "running.json").write_text(json.dumps(content))

    client = serve(run)

    (listed,) = client.get("runs")["runs"]
    assert (listed["num_episodes"], listed["num_running"], listed["error"]) == (1, 0, None)
    assert client.get("runs/0/running") == {"total": 0, "episodes": []}
    assert main(["view", str(run), "--export", str(tmp_path / "page.html")]) == 0


@pytest.mark.many_cases(4)
@pytest.mark.parametrize("calls", ODD_CALLS, ids=repr)
def test_odd_tool_calls_are_shown(tmp_path, serve, calls):
    """The page gets each call as an object of texts, whatever the file has; the export has it too."""
    message = {"role": 3, "content": {"a": 1}, "tool_calls": calls, "name": []}
    run = write_run(tmp_path, [build_episode(messages=(message,))])

    episode = serve(run).get("runs/0/episode", key="task-0000/0")

    (shown,) = episode["messages"]
    assert (shown["role"], shown["content"], shown["name"]) == ("3", '{"a": 1}', "[]")
    for call in shown.get("tool_calls", ()):
        assert {type(call["function"][name]) for name in ("name", "arguments")} == {str}
    assert len(shown.get("tool_calls", ())) == (len(calls) if isinstance(calls, list) else calls is not None)
    assert main(["view", str(run), "--export", str(tmp_path / "page.html")]) == 0
    assert main(["convert", str(run), "--to", "atif", "--out", str(tmp_path / "run.atif.jsonl")]) == 0
