"""Hostile names: what a model, a tool or a data set may choose is text in every view, and nothing of it runs."""

import json
import time
import urllib.parse

import pytest
from attrs import evolve
from viewer_runs import HOSTILE, build_episode, build_record, write_run

from turnwise.record.lineage import RecordLineage
from turnwise.record.outside_call import OutsideCall
from turnwise.types import Fault, Status, Task, TurnScore
from turnwise_result_files.running_episodes import RUNNING_FILE

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow

NAME = HOSTILE.replace("\ud800", "")
"""Without half a surrogate pair, which no column of a file has."""
SHOWN = "<img src=x onerror=\"document.title='owned'\">\\u202eright to left\\u202c zero\\u200bwidth"
VIEWS = {
    "episodes": "table.episodes tbody tr",
    "groups": ".group",
    "training": ".chart",
    "time": ".timeline",
    "episode?view=turns&key=": ".message",
    "episode?view=tokens&key=": "[data-i]",
    "episode?view=data&key=": ".text",
}
"""Each view, and an element that it has when it is complete."""


def write_hostile_run(folder):
    """Write a run in which every name and text is hostile; return its folder."""
    fault = Fault(owner="tool", kind=NAME, message=NAME, traceback=NAME)
    task = Task(
        messages=({"role": "user", "content": NAME},),
        uid=NAME,
        ground_truth=NAME,
        data_source=NAME,
        agent_name=NAME,
        extra={NAME: NAME},
    )
    episode = build_episode(
        task=0,
        text=NAME,
        agent_name=NAME,
        status=Status.FAILED,
        fault=fault,
        trajectories=(build_record(), build_record((5, 7))),
        scores=(TurnScore(values=(0.25, 0.5), extra={NAME: 0.5}),) * 2,
        outside_calls=(OutsideCall(model=NAME, path=NAME, request=NAME, response=NAME),),
        lineage=(RecordLineage(kind="main"), RecordLineage(parent=0, num_shared_tokens=4, kind="branch", label=NAME)),
    )
    write_run(folder, [evolve(episode, task=task)])
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5, NAME: 1.0}) + "\n")
    process = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": NAME}}
    work = {"ph": "X", "name": NAME, "cat": "episode", "ts": 0, "dur": 5, "pid": 1, "tid": 1, "args": {"uid": NAME}}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [process, work]}))
    now = time.time() + 3600  # an old file is of a killed run
    running = {"key": NAME, "agent_name": NAME, "worker": NAME, "num_turns": 1, "num_tokens": 9, "last": NAME}
    state = {"written_at": now, "total": 1, "episodes": [running | {"started_at": now, "last_at": now}]}
    (folder / RUNNING_FILE).write_text(json.dumps(state))
    return folder


def test_hostile_names_are_text_in_every_view(tmp_path, serve, visit):
    """Uids, agents, faults, labels, metrics, workers and slices with markup are text in each view and in its title."""
    client = serve(write_hostile_run(tmp_path / "run"))
    key = urllib.parse.quote(client.get("runs/0/episodes")["episodes"][0]["key"], safe="")
    page = visit(client.url)

    for view, complete in VIEWS.items():
        page.goto(f"{client.url}#/0/{view}{key if view.endswith('=') else ''}")
        page.reload()
        page.locator(complete).first.wait_for()
        if view == "training":
            page.get_by_label("Further metric").select_option(NAME)
        sync_api.expect(page.locator("main").get_by_text(SHOWN).first).to_be_attached()
        assert page.locator("main img, main script, main iframe, main a[href^=javascript]").count() == 0, view
        title = page.title()
        assert title != "owned", view
        assert title.isprintable(), view
