"""`turnwise train` and `turnwise eval` from the command line, with an engine that is deterministic to the bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from training_site import make_site, run, start, steps_of, train

from turnwise.cli import main


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to train in."""
    return make_site(tmp_path)


@pytest.mark.slow
def test_modes(site: Path) -> None:
    """
    On shared devices, `sync` learns the same bits; `async` never trains on a group that is too stale.

    In `async`, the bound allows more groups in flight, 8, than there are tasks, 5.
    """
    sync = train(site, "sync")
    hybrid = train(site, "hybrid", "memory.mode=hybrid")
    one, two = (load_file(out / "model" / "model.safetensors") for out in (sync, hybrid))
    assert all((one[name] == two[name]).all() for name in one)
    stages = ("sleep", "onload", "offload_optimizer", "wake_up_weights", "sync_weights", "wake_up_kv_cache")
    trained = [line for line in steps_of(hybrid) if "reward/mean" in line]
    assert all(f"switch/{stage}_s" in line for line in trained for stage in stages)
    assert "| wake up engine's KV cache |" in (hybrid / "report.md").read_text()

    overlapping = train(
        site, "async", "train.mode=async", "train.num_steps=6", "train.buffer.max_staleness=1", "train.tasks_per_step=4"
    )
    staleness = [line["buffer/staleness"] for line in steps_of(overlapping) if "reward/mean" in line]
    assert 6 == len(staleness)
    assert max(staleness) <= 1


@pytest.mark.slow
def test_the_best_step_is_exported(site: Path) -> None:
    """With `export: best`, `model` has the weights of the best held-out step, and `turnwise export` finds the same."""
    out = train(site, "out", "train.validation.every=1", "train.checkpoint.export=best", "train.checkpoint.keep_last=1")
    scores = {
        line["step"]: line["validation/reward/mean"] for line in steps_of(out) if "validation/reward/mean" in line
    }
    best = max(scores, key=lambda step: (scores[step], -step))

    output = run(site, "export", str(out), "--to", str(site / "best"), "--checkpoint", "best")

    assert f"the model after step {best} of" in output
    one, two = (load_file(folder / "model.safetensors") for folder in (out / "model", site / "best"))
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)
    assert f"The weights after step {best} of 3" in (out / "model" / "README.md").read_text()
    assert {best, 3} == {int(path.name[-8:]) for path in (out / "checkpoints").iterdir()}


@pytest.mark.slow
def test_a_group_reward_is_trained_on(site: Path) -> None:
    """A function scores the groups of training and of held-out tasks; the trainer gets its scores alone."""
    (site / "ranks.py").write_text(
        "def ranks(episodes):\n"
        "    order = sorted(range(len(episodes)), key=lambda index: (episodes[index].reward, index))\n"
        "    return [float(order.index(index)) for index in range(len(episodes))]\n"
    )
    out = train(
        site,
        "out",
        "modules=[./ranks.py]",
        "group_reward=./ranks.py:ranks",
        "train.validation.every=1",
        "train.num_steps=2",
    )

    trained = [line["reward/mean"] for line in steps_of(out) if "reward/mean" in line]
    held_out = [line["validation/reward/mean"] for line in steps_of(out) if "validation/reward/mean" in line]
    assert trained == [1.0] * 2  # the mean of the ranks 0, 1 and 2
    assert set(held_out) == {0.5}


@pytest.mark.slow
def test_results_of_a_training(site: Path) -> None:
    """A training writes curve, report, TensorBoard, W&B, MLflow and a model for `from_pretrained`, without a gap."""
    store = site / "store"
    out = train(
        site,
        "out",
        "train.checkpoint.keep_last=1",
        f"observers=[witness, tensorboard, {{name: wandb, mode: offline}}, {{name: mlflow, tracking_uri: 'file://{store}'}}]",
        MLFLOW_ALLOW_FILE_STORE="true",
    )

    assert b"\x89PNG" == (out / "curve.png").read_bytes()[:4]
    assert "| reward |" in (out / "report.md").read_text()
    assert list((out / "tensorboard").glob("events*"))
    assert list((out / "wandb").glob(f"offline-run-*-{(out / 'wandb_run_id.txt').read_text().strip()}"))
    run_id = (out / "mlflow_run_id.txt").read_text().strip()
    (rewards,) = store.glob(f"*/{run_id}/metrics/reward/mean")
    assert [line["reward/mean"] for line in steps_of(out) if "reward/mean" in line] == [
        float(line.split()[1]) for line in rewards.read_text().splitlines()
    ]
    assert ["step-00000003"] == [path.name for path in (out / "checkpoints").iterdir()]
    assert max(line["gap/max"] for line in steps_of(out) if "gap/max" in line) < 1e-5
    results = site / "eval"
    evaluated = ("eval", str(site / "config.yaml"), f"model.path={out / 'model'}", "--k", "1,2")
    output = run(site, *evaluated, "--out", str(results))
    assert "pass@2" in output
    assert 5 == json.loads((results / "evaluation.json").read_text())["tasks"]


def run_refused(site: Path, *arguments: str) -> str:
    """Run a command that must exit with code 2, and return its one line of error."""
    process = start(site, *arguments)
    _, err = process.communicate()
    assert 2 == process.returncode, err
    (line,) = [line for line in err.splitlines() if line.startswith("turnwise: error:")]
    return line


BAD: Sequence[tuple[tuple[str, ...], str]] = (
    (("train.optimizer.lrr=1",), "train.optimizer.lrr: unknown key; did you mean 'lr'?"),
    (("rollout.n=1",), "rollout.n: must be at least 2"),
    (("rollout.sampling.top_p=0.9",), "top_p must be 1"),
    (("train.tasks_per_step=6",), "is more than the 5 tasks"),
    (("train.mode=fast",), "train.mode: expected one of sync, async"),
    (("engine.name=vlm",), "vlm"),
    (("observers=[wandbb]",), "observers.0: unknown observer 'wandbb'; did you mean 'wandb'?"),
    (("model.path=nowhere",), "nowhere"),
)


@pytest.mark.parametrize(("overrides", "text"), BAD, ids=str)
def test_bad_input(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    text: str,
) -> None:
    """A bad value ends the command with one line and exit code 2, before anything is started."""
    monkeypatch.syspath_prepend(str(site))

    assert 2 == main(["train", str(site / "config.yaml"), *overrides, "--dry-run"])
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


@pytest.mark.slow
def test_dry_run(site: Path) -> None:
    """`--dry-run` prints the plan and writes nothing."""
    output = run(site, "train", str(site / "config.yaml"), "--dry-run")

    assert "3 tasks x 3 = 9 episodes" in output
    assert not (site / "metrics.jsonl").exists()
