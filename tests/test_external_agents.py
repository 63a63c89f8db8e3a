"""The examples of agents in other stacks: valid configs, and episodes of each that is installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from turnwise import load_config
from turnwise.config.resolve import resolve
from turnwise.plugin.host import load
from turnwise.record.invariants import check_trajectory
from turnwise.types import Status
from turnwise_grpo_trainer.processes.placement import describe_plan
from turnwise_grpo_trainer.train_setup import read_setup
from turnwise_result_files import read_results

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples/external_agents"
CONFIGS = ROOT / "examples/external_openai"
AGENTS = ("openai", "langgraph", "openai_agents", "pydantic_ai", "anthropic", "javascript")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script `run.py`."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "run", raising=False)
    import run

    monkeypatch.delitem(sys.modules, "run")
    assert Path(run.__file__).parent == FOLDER
    return run


def test_every_agent_has_its_files(runner: ModuleType) -> None:
    """The script knows all agents, and each has its program and its pinned packages."""
    assert AGENTS == runner.AGENTS
    for agent in runner.PYTHON_AGENTS:
        assert (FOLDER / f"{agent}_agent.py").is_file()
        pins = (FOLDER / f"requirements/{agent}.txt").read_text(encoding="utf-8").splitlines()
        assert all("==" in pin for pin in pins)
    assert 40 == len((FOLDER / "openai_agent.py").read_text(encoding="utf-8").splitlines())  # as its README says
    packages = json.loads((FOLDER / "javascript/package.json").read_text(encoding="utf-8"))["dependencies"]
    locked = json.loads((FOLDER / "javascript/package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert packages == {name: locked[f"node_modules/{name}"]["version"] for name in packages}


@pytest.mark.parametrize("agent", AGENTS)
def test_configs(runner: ModuleType, agent: str, tmp_path: Path) -> None:
    """The overrides of the script fit the configs of rollout and training; the check starts nothing."""
    rollout = resolve(load_config(CONFIGS / "rollout.yaml", runner.rollout_overrides(agent)), load())
    setup = read_setup(str(CONFIGS / "train.yaml"), runner.pull_overrides(tmp_path / "control.json"))

    assert str(FOLDER) in rollout.agent.options["command"][-1]
    assert "16 tasks x 8" in dict(describe_plan(setup))["a step"]


def test_the_configs_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configs of the agents with `openai` and of the pulling ones are valid."""
    monkeypatch.syspath_prepend(CONFIGS)
    assert "16 tasks x 8" in dict(describe_plan(read_setup(str(CONFIGS / "train.yaml"))))["a step"]
    for folder in ("external_openai", "external_pull"):
        resolve(load_config(ROOT / "examples" / folder / "rollout.yaml"), load())


@pytest.mark.parametrize(
    ("expression", "result"),
    [("23 + 48", "71"), ("-3 * 7", "-21"), (" 5 - -2 ", "7"), ("1 + 2 * 3", None), ("2 ** 9", None), ("x", None)],
)
def test_the_calculator(expression: str, result: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes one operation, and says why it does not compute anything else."""
    monkeypatch.syspath_prepend(FOLDER)
    from calculator import calculator, negate

    assert (result or "Error: only one operation per call") == calculator(expression)
    assert "-3" == negate("3")


COMMAND = """
import time
try:
    print("started", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # as if it wrote a checkpoint
    raise SystemExit(130)
"""


def start_script(needed: str = "None") -> subprocess.Popen[str]:
    """Start a process in which the script runs `COMMAND`, and wait until that has started."""
    source = f"import run, subprocess, sys; sys.exit(run.run([sys.executable, '-c', {COMMAND!r}], {needed}))"
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert "started\n" == process.stdout.readline()
    return process


def test_ctrl_c_lets_the_command_end() -> None:
    """The script waits until an interrupted training has saved its state, and returns its exit code."""
    process = start_script()

    os.killpg(process.pid, signal.SIGINT)

    _, errors = process.communicate(timeout=600)
    assert 130 == process.returncode, errors


def test_the_end_of_the_agents_ends_the_command() -> None:
    """A training whose agents have crashed would wait for ever; it is ended, and the reason is said."""
    process = start_script("subprocess.Popen([sys.executable, '-c', 'raise SystemExit(3)'])")

    _, errors = process.communicate(timeout=600)
    assert 0 != process.returncode
    assert "the agents ended with exit code 3" in errors


def test_a_missing_program_is_named(runner: ModuleType) -> None:
    """A machine without Node.js gets one line, and no traceback."""
    with pytest.raises(SystemExit, match=r"^no-such-node is not installed$"):
        runner.start(["no-such-node", "agent.mjs"])


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest, runner: ModuleType) -> str:
    """An agent whose packages are installed."""
    if not runner.is_installed(request.param):
        pytest.skip(f"not installed: python examples/external_agents/run.py install {request.param}")
    name: str = request.param
    return name


def run_script(*arguments: str) -> str:
    """Run the script, and return its output."""
    command = [sys.executable, str(FOLDER / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_rollout(agent: str, tmp_path: Path) -> None:
    """A program for each episode: one record per episode, with turns, results of the tool, and sampled tokens."""
    run_script("rollout", agent, "--out", str(tmp_path), "data.limit=4", "rollout.n=1")

    results = read_results(tmp_path / "trajectories.parquet")
    assert 4 == len(results)
    assert {result.status for result in results} <= {Status.COMPLETED, Status.TRUNCATED}
    assert [1] * 4 == [len(result.trajectories) for result in results]
    assert max(len(result.trajectories[0].turns()) for result in results) >= 2
    assert any(message["role"] == "tool" for result in results for message in result.messages)
    for result in results:
        check_trajectory(result.trajectories[0])


@pytest.mark.slow
def test_an_evaluation(agent: str, tmp_path: Path) -> None:
    """One process leases all episodes of `turnwise eval`; none fails, and some are solved."""
    out = tmp_path / "eval"
    run_script("eval", agent, "--out", str(out), "rollout.validation_n=1")

    report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert (64, 0) == (report["episodes"], report["failed"])
    # The model was trained with one tool; with two it solves fewer tasks before it has learnt.
    assert report["results"]["all"]["pass@1"]["value"] > (0.02 if agent == "openai" else 0.2)
