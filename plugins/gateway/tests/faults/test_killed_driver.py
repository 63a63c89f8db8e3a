"""SIGKILL of a driver, which has the gateway in its process: agents die with it, and `--resume` finishes the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from turnwise import Status
from turnwise.record.invariants import check_trajectory
from turnwise_result_files import read_results
from turnwise_testing.installation import install_plugin
from turnwise_testing.tokenizers import byte_tokenizer

NUM_TASKS = 12
PROGRAM = Path(__file__).parents[1] / "programs" / "linger.py"
ENGINE = """
import turnwise
from turnwise_testing.agent_probe import probe_chat
from turnwise_testing.scripted import ScriptedEngine


def make(config, resources):
    reply = [*probe_chat().tokenizer.encode("It is done."), probe_chat().stop_token_ids[0]]
    return ScriptedEngine(lambda request: reply)


@turnwise.hookimpl
def register_engines(registry):
    registry.add("one_reply", make)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run of twelve tasks: the agents of the first six end, and the others wait in vain."""
    install_plugin(tmp_path / "site", "acme_one_reply", ENGINE)
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": f"Question {number}"}]} for number in range(NUM_TASKS)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "hold").touch()
    (tmp_path / "pids").mkdir()
    config = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "engine": "one_reply",
        "agent": {"name": "external", "command": ["python", str(PROGRAM), "hold", "pids"]},
        "reward": "reported",
        "rollout": {"prompt_length": 256, "response_length": 256, "max_in_flight": 4},
        "plugins": ["acme_one_reply", "gateway"],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `turnwise rollout`; its output is in the file `log`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "turnwise.cli", "rollout", *arguments]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)


def wait_until(condition: Callable[[], object], text: Callable[[], str]) -> None:
    """Wait until a condition holds; fail with a text when it never does."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, text()
        time.sleep(0.05)


def is_alive(pid: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
def test_a_killed_driver_loses_and_doubles_nothing(folder: Path) -> None:
    """After the resumed run every task has one result; agents of the killed driver have died, and their children."""
    log = (folder / "log").read_text
    partial = folder / "out" / "trajectories.parquet.partial"
    driver = start(folder, "run.yaml", "--out", "out")
    try:
        wait_until(lambda: driver.poll() is not None or len(list((folder / "pids").iterdir())) >= 8, log)
        wait_until(lambda: driver.poll() is not None or (partial.exists() and len(read_results(partial)) >= 6), log)
        assert driver.poll() is None, log()
    finally:
        driver.kill()
        driver.wait()
    agents = [path.name for path in (folder / "pids").iterdir()]
    wait_until(lambda: not any(map(is_alive, agents)), lambda: f"some of {agents} are alive")
    before = {result.uid: result for result in read_results(partial)}
    assert {Status.COMPLETED} == {result.status for result in before.values()}

    (folder / "hold").unlink()
    resumed = start(folder, "--resume", "out")
    try:
        assert 0 == resumed.wait(timeout=120), log()
    finally:
        resumed.kill()
        resumed.wait()
    results = read_results(folder / "out")
    assert NUM_TASKS == len(results)
    assert {1} == set(Counter(result.uid for result in results).values())
    for result in results:
        assert (Status.COMPLETED, 1.0) == (result.status, result.reward)
        check_trajectory(result.trajectories[0])
        if result.uid in before:
            kept = before[result.uid].trajectories[0].input_ids
            assert kept.tolist() == result.trajectories[0].input_ids.tolist()
