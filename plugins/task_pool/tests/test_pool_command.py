"""`turnwise pool` on a pool file: counts, rollouts, results, and dead rollouts that are handed out again."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path

import pytest
from gateway_rollouts import start_rollout, write_rollout

from turnwise.cli import main
from turnwise_gateway.control.scores import Verdict
from turnwise_task_pool.pool.sqlite_store import SqliteStore
from turnwise_task_pool.pool.store import PoolTask


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A pool with one rollout in each state."""
    path = tmp_path / "pool.sqlite"
    store = SqliteStore(path, max_attempts=1)
    for uid in ("done", "dead", "leased", "ready"):
        store.put(PoolTask(uid=uid), capacity=9)
    now = time.time()
    done, dead, _leased = [store.lease(f"worker {number}", now=now, lease_s=300) for number in range(3)]
    assert done is not None
    assert dead is not None
    store.complete(done.id, done.fence, now=now, score=0.5)
    store.fail(dead.id, dead.fence, now=now, owner="agent", reason="no idea")
    store.close()
    return path


def test_a_status_counts_the_states(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the lease with its worker, and the dead rollout with its reason."""
    assert 0 == main(["pool", "status", str(pool), "--json"])

    status = json.loads(capsys.readouterr().out)
    assert {"ready": 1, "leased": 1, "done": 1, "dead": 1} == status["counts"]
    (leased,) = status["leased"]
    assert ("leased", "worker 2") == (leased["uid"], leased["worker"])
    assert 0 < leased["expires_in_s"] <= 300
    assert [("dead", "no idea")] == [(each["uid"], each["reason"]) for each in status["dead"]]


def test_lists_are_for_people_too(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of all rollouts, or of those in a state."""
    assert 0 == main(["pool", "list", str(pool)])
    shown = capsys.readouterr().out
    assert 0 == main(["pool", "list", str(pool), "--state", "ready", "--json"])

    assert all(uid in shown for uid in ("done", "dead", "leased", "ready"))
    assert ["ready"] == [each["uid"] for each in json.loads(capsys.readouterr().out)]


def test_an_export_has_a_line_for_each_result(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of their arrival."""
    assert 0 == main(["pool", "export", str(pool)])

    results = list(map(json.loads, capsys.readouterr().out.splitlines()))
    expected = [("done", 0.5, None), ("dead", None, "agent")]
    assert expected == [(each["uid"], each["score"], each["owner"]) for each in results]


@pytest.mark.parametrize("action", ["requeue", "retry"])
def test_dead_rollouts_are_handed_out_again(pool: Path, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before later ones, with all their attempts; late news of the old lease change nothing."""
    assert 0 == main(["pool", action, str(pool), "another"])
    assert 0 == main(["pool", action, str(pool), "dead"])

    assert [
        "rollouts that are ready again: 0",
        "rollouts that are ready again: 1",
    ] == capsys.readouterr().out.splitlines()
    store = SqliteStore.open(pool)
    lease = store.lease("new", now=time.time(), lease_s=300)
    assert lease is not None
    assert ("dead", 1) == (lease.uid, lease.attempt)
    old = f"{lease.id.rpartition('-')[0]}-2"
    assert Verdict.LATE is store.complete(old, 2, now=time.time(), score=1.0)
    assert Verdict.ACCEPTED is store.complete(lease.id, lease.fence, now=time.time(), score=1.0)
    assert ["done", "dead"] == [each.uid for each in store.results()]
    store.close()


def test_other_files_are_refused_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each, exit code 2, and no table is added to a database of somebody else's."""
    text, other, missing = tmp_path / "text", tmp_path / "other.sqlite", tmp_path / "missing"
    text.write_text("no database, and long enough to look at" * 40)
    database = sqlite3.connect(other)
    database.execute("CREATE TABLE mine (number)")
    database.close()
    before = other.read_bytes()

    assert [2, 2, 2] == [main(["pool", "requeue", str(path)]) for path in (text, other, missing)]

    errors = capsys.readouterr().err.splitlines()
    assert ["cannot be used" in errors[0], "not a task pool" in errors[1], "no such file" in errors[2]] == [True] * 3
    assert 3 == len(errors)
    assert before == other.read_bytes()


EDITS = {
    "a later format": "PRAGMA user_version=9",
    "an unknown state": "UPDATE rollout SET state = 'lost' WHERE state = 'ready'",
    "a result without its rollout": "DELETE FROM rollout WHERE state = 'done'",
    "an end without a result": "DELETE FROM result WHERE state = 'dead'",
    "a result of an open rollout": "UPDATE rollout SET state = 'ready' WHERE state = 'done'",
    "no task": "DELETE FROM task_group WHERE uid = 'ready'",
    "a content that is no JSON": "UPDATE task_group SET content = '{' WHERE uid = 'ready'",
    "a content that is a list": "UPDATE task_group SET content = '[]' WHERE uid = 'ready'",
    "a score that is no JSON": "UPDATE result SET score = 'NaN'",
    "metrics that are a list": "UPDATE result SET metrics = '[]'",
    "a text as the number of attempts": "UPDATE rollout SET attempt = 'many'",
    "a fence below 0": "UPDATE rollout SET fence = -1",
    "a fence to come": "UPDATE rollout SET fence = 1000 WHERE state = 'leased'",
    "a lease without an end": "UPDATE rollout SET until = NULL WHERE state = 'leased'",
}


@pytest.mark.many_cases
@pytest.mark.parametrize("action", ["status", "list", "requeue", "export"])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_pools_are_refused(pool: Path, edit: str, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A pool that another program has changed is one line that names the file, and exit code 2."""
    database = sqlite3.connect(pool)
    database.execute(EDITS[edit])
    database.commit()
    database.close()

    assert main(["pool", action, str(pool)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(pool) in line


@pytest.mark.many_cases
@pytest.mark.parametrize("action", ["status", "list", "requeue", "export"])
@pytest.mark.parametrize("start", range(100, 16_000, 1500))
def test_damaged_pools_are_no_traceback(
    pool: Path, start: int, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool with overwritten bytes is one line and exit code 2, or shows what it has if nothing read is hurt."""
    content = bytearray(pool.read_bytes())
    content[start : start + 700] = b"\xa5" * len(content[start : start + 700])
    pool.write_bytes(content)

    code = main(["pool", action, str(pool)])

    assert code in (0, 2)
    assert len(capsys.readouterr().err.splitlines()) == (code == 2)


@pytest.mark.slow
def test_a_run_refuses_a_pool_of_another_format(pool: Path, tmp_path: Path) -> None:
    """`turnwise rollout` says so in a line, and ends with exit code 2."""
    database = sqlite3.connect(pool)
    database.execute("PRAGMA user_version=9")
    database.close()
    pull = {"control_file": "control.json", "pool_file": str(pool)}
    write_rollout(tmp_path, 1, {"name": "task_pool", **pull}, max_in_flight=1)

    with start_rollout(tmp_path, "run.yaml", "--out", "out") as process:
        code = process.wait(600)

    log = (tmp_path / "log").read_text()
    assert code == 2, log
    assert "format 9" in log
    assert "Traceback" not in log


def test_a_control_port_that_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line: exit code 1 for a closed port, and 2 for a file that is none of a port."""
    file = tmp_path / "control.json"
    file.write_text(json.dumps({"url": "http://127.0.0.1:1", "secret": "s"}))

    assert 1 == main(["pool", "status", str(file)])
    file.write_text("{}")
    assert 2 == main(["pool", "status", str(file)])

    errors = capsys.readouterr().err.splitlines()
    assert ["cannot be asked" in errors[0], "not the file of a control port" in errors[1]] == [True, True]
