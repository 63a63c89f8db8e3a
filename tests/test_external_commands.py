"""An outside agent needs one command: `turnwise rollout`, `train` and `eval` with the example's agents."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.record.invariants import check_trajectory
from turnwise.types import Status
from turnwise_result_files import read_results

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = EXAMPLES / "external_openai"


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the example can be imported, in this test only."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("agent", "async_agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def one_task(tmp_path: Path) -> str:
    """An override with one held-out task."""
    first, _, _ = (EXAMPLES / "heldout_calculator.jsonl").read_text(encoding="utf-8").partition("\n")
    (tmp_path / "task.jsonl").write_text(first + "\n", encoding="utf-8")
    return f"data.validation_path={tmp_path / 'task.jsonl'}"


def test_rollout(tmp_path: Path) -> None:
    """A program for the episode leaves one record, with sampled tokens."""
    program = f"agent.command=[python, '{FOLDER / 'agent.py'}']"
    options = (program, "data.limit=1", "rollout.n=1", "--out", str(tmp_path / "out"))

    assert main(["rollout", str(FOLDER / "rollout.yaml"), *options]) == 0

    (result,) = read_results(tmp_path / "out/trajectories.parquet")
    (record,) = result.trajectories
    assert result.status in (Status.COMPLETED, Status.TRUNCATED)
    assert 0 < record.response_mask.sum()
    check_trajectory(record)


@pytest.mark.slow
@pytest.mark.usefixtures("function")
def test_train(tmp_path: Path, one_task: str) -> None:
    """A step learns from exactly the tokens that the model sampled."""
    options = ("train.num_steps=1", "train.tasks_per_step=2", "rollout.n=2", "rollout.validation_n=1", one_task)

    assert main(["train", str(FOLDER / "train.yaml"), *options, "--out", str(tmp_path / "out")]) == 0

    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (step,) = (line for line in lines if "reward/mean" in line)
    assert 0 == step["status/failed"]
    assert 0 < step["tokens/action"]
    assert step["gap/max"] < 1e-3
    assert 2 == sum("validation/reward/mean" in line for line in lines)


@pytest.mark.usefixtures("function")
def test_eval(tmp_path: Path, one_task: str) -> None:
    """The report has the episodes of the outside agent."""
    out = tmp_path / "eval"

    assert main(["eval", str(FOLDER / "train.yaml"), "rollout.validation_n=2", one_task, "--out", str(out)]) == 0

    report = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    assert (2, 0, 1) == (report["episodes"], report["failed"], report["tasks"])
