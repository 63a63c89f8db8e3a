"""Rewards of verl and TRL as a run's own code, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, environment_of, write_scripted_run

OWN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    assert "<|im_end|>" not in solution_str
    return {"score": factor * (data_source == "gsm8k") * len(ground_truth), "acc": True, "split": extra_info["split"]}


async def compute_score_async(data_source, solution_str, ground_truth, **kwargs):
    return 0.25 * len(ground_truth) + 0 * len(kwargs["extra_info"])


def number(solution_str, ground_truth):
    return float(len(solution_str) >= 0)


def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}


def of_trl(prompts, completions, solution, **kwargs):
    (prompt,), (completion,) = prompts, completions
    assert prompt[-1]["role"] == "user" and completion[-1]["role"] == "assistant"
    assert len(kwargs["completion_ids"][0]) > 0
    return [len(text) / 2 for text in solution]


async def unscored(completions, prompts):
    return [None]


def two(completions, prompts):
    return [1.0, 2.0]


def strange(first, second):
    return 1.0
"""
ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 0},
    "solution": "wxyz",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run over a row of verl, with a column of TRL."""
    write_scripted_run(tmp_path, plugins=[PLUGIN, "plain_functions"], modules=["./own.py"])
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "data.jsonl").write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / SITE)
    monkeypatch.setenv("PYTHONPATH", environment_of(tmp_path)["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(reward: str, *changes: str) -> int:
    return main(["rollout", "run.yaml", f"reward={reward}", *changes, "--out", "out"])


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("./own.py:compute_score", 2.0),
        ("{name: './own.py:compute_score', factor: 0.5}", 1.0),
        ("./own.py:compute_score_async", 0.5),
        ("./own.py:number", 1.0),
        ("./own.py:of_trl", 2.0),
        ("./own.py:unscored", None),
    ],
)
def test_a_reward_of_a_peer_scores_as_there(folder: Path, reward: str, expected: float | None) -> None:
    """It is named in the config like a reward of ours, unchanged; other values of verl's dictionary are metrics."""
    assert 0 == run(reward)

    results = read_results(folder / "out")
    assert [expected] * 2 == [each.reward for each in results]
    if "compute_score" in reward and "async" not in reward:
        assert [1.0] * 2 == [each.metrics.extra["acc"] for each in results]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("reward", ["./own.py:compute_score", "./own.py:of_trl"])
def test_a_reward_worker_scores_the_same(folder: Path, reward: str) -> None:
    """The episode reaches it without the agent."""
    assert 0 == run(reward, "runtime={name: ray, num_workers: 1, num_replicas: 1, reward_workers: 1}")
    assert [2.0] * 2 == [each.reward for each in read_results(folder / "out")]


@pytest.mark.parametrize(
    ("reward", "code", "text"),
    [
        ("./own.py:no_score", 1, "the reward returned a dictionary without 'score'; it has acc"),
        ("./own.py:two", 1, "returned [1.0, 2.0]; a reward with completions returns a list with one number"),
        ("./own.py:strange", 2, "missing a required argument: 'second'; the function gets the episode as its only"),
        ("{name: './own.py:compute_score', bonus: 1}", 2, "got an unexpected keyword argument 'bonus'"),
    ],
)
def test_a_reward_that_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str], reward: str, code: int, text: str
) -> None:
    """One line says what the function gets or must return."""
    assert code == run(reward)
    assert text in capsys.readouterr().err.splitlines()[-1]


def test_a_row_without_a_truth_is_an_error_of_its_row(folder: Path) -> None:
    """A reward of verl that needs a truth never compares with None; one with a default for it runs."""
    row = {name: value for name, value in ROW.items() if name not in ("reward_model", "solution")}
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")

    assert run("./own.py:compute_score") != 0

    for result in read_results(folder / "out"):
        assert result.fault is not None
        assert "has no ground truth, which the reward needs; name its column in" in result.fault.message
