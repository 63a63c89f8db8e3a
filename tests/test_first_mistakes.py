"""Mistakes of the first hour, on the command line: one line each, before anything is loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import structlog
import torch

from turnwise import RolloutManager, load_config
from turnwise.cli import main
from turnwise_testing.whole_runs.scripted_run import SITE, write_scripted_run

ROOT = Path(__file__).parents[1]
CALCULATOR = ROOT / "examples/calculator.yaml"
TRAINING = ROOT / "examples/train_calculator.yaml"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line of standard error."""
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_a_folder_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the tokenizer, and not the chat template, and no library has been loaded for it."""
    spec = find_spec("turnwise_calculator_demo")
    assert spec is not None
    assert spec.origin is not None
    model = tmp_path / "model"
    shutil.copytree(Path(spec.origin).with_name("model"), model)
    for file in [*model.glob("tokenizer*"), *model.glob("*.jinja"), *model.glob("vocab*"), *model.glob("merges*")]:
        file.unlink()
    assert main(["rollout", str(CALCULATOR), f"model.path={model}", "--out", str(tmp_path / "out")]) == 2
    assert f"model.path: '{model}' has no tokenizer files, such as tokenizer.json" in error_of(capsys)


@NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_an_engine_without_its_gpu(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the key and the device; the model is not read, which does not even exist as weights."""
    arguments = ["rollout", str(CALCULATOR), f"engine.device={device}", "data.limit=1", "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert f"engine.device: there is no {device}: " in capsys.readouterr().err.strip().splitlines()[-1]


@NO_GPU
def test_a_trainer_without_its_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the key, before the engine starts."""
    assert main(["train", str(TRAINING), "train.policy.device=cuda", "--out", str(tmp_path / "out")]) == 2
    assert "train.policy.device: there is no cuda: " in error_of(capsys)


def test_a_word_that_is_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the words that are some."""
    assert main(["rollout", str(CALCULATOR), "engine.device=gpu", "--out", str(tmp_path / "out")]) == 2
    assert "engine.device: 'gpu' is no device of torch; use auto, cpu, cuda or cuda:1" in capsys.readouterr().err


def test_an_evaluation_without_held_out_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the key with an example."""
    assert main(["eval", str(CALCULATOR)]) == 2
    assert "data.validation_path: missing" in (line := error_of(capsys))
    assert "for example data.validation_path=questions.jsonl" in line


def test_show_of_a_folder_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says so, and nothing about endings of files."""
    assert main(["show", str(tmp_path / "gone")]) == 2
    assert (
        error_of(capsys)
        == f"turnwise: error: {tmp_path / 'gone'}: does not exist; name the folder of a rollout, as given to --out"
    )


def test_the_package_is_a_command() -> None:
    """`python -m turnwise` is `turnwise`."""
    done = subprocess.run([sys.executable, "-m", "turnwise", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: turnwise ")


@pytest.mark.parametrize("configured", [False, True], ids=["script", "own log"])
def test_a_script_has_the_log_of_its_config(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`RolloutManager.from_config` applies `telemetry`, unless the script has configured structlog itself."""
    write_scripted_run(tmp_path, num_tasks=1, telemetry={"log_level": "warning", "log_format": "json"})
    monkeypatch.syspath_prepend(tmp_path / SITE)
    before = structlog.get_config()
    structlog.reset_defaults()
    try:
        if configured:
            structlog.configure(processors=[structlog.processors.JSONRenderer()])
        RolloutManager.from_config(load_config(tmp_path / "run.yaml"))
        log = structlog.get_logger()
        log.info("quiet")
        log.warning("loud")
    finally:
        structlog.configure(**before)
    shown = capsys.readouterr()
    if configured:
        assert '"quiet"' in shown.out
    else:
        (line,) = shown.err.splitlines()
        assert json.loads(line)["event"] == "loud"


@pytest.mark.slow
def test_no_bars_among_the_lines_of_a_log(tmp_path: Path) -> None:
    """In a pipe, each line of a rollout's standard error is an object."""
    arguments = [
        "rollout",
        str(CALCULATOR),
        "data.limit=1",
        "telemetry.log_format=json",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run([sys.executable, "-m", "turnwise", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Loading weights" not in done.stderr
    assert all(isinstance(json.loads(line), dict) for line in done.stderr.splitlines())
