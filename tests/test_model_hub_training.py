"""Training, evaluation, fine-tuning and Ray with a model of the hub, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hub_runs import DUPLICATES, NAME, snapshot, turnwise, write_run

from turnwise_result_files import read_results
from turnwise_testing.inputs.model_hub import ModelHub
from turnwise_testing.inputs.tiny_chat import make_tiny_model

pytestmark = pytest.mark.slow
TRAIN = {
    "num_steps": 1,
    "tasks_per_step": 2,
    "policy": {"device": "cpu"},
    "algorithm": {"adv_estimator": "grpo", "old_log_probs": "rollout"},
}
PLUGINS = ["grpo_trainer", "weight_transports"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny model, and of its other forms."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return {each.name: each.read_bytes() for each in folder.iterdir()} | DUPLICATES


@pytest.fixture
def hub():
    """A hub without models."""
    with ModelHub() as running:
        yield running


def saved_model(out: Path) -> dict[str, object]:
    """Return the section `model` of the config that a command has written."""
    (file,) = [each for each in (out / "config.resolved.yaml", out / "config.yaml") if each.exists()]
    found: dict[str, object] = yaml.safe_load(file.read_text(encoding="utf-8"))["model"]
    return found


def test_training_keeps_its_commit(tmp_path, tiny, hub):
    """
    A training downloads once; resumed when the branch has moved, it trains the same weights on.

    The dry run downloads no weights, and knows their size. `export` takes the commit of the training.
    """
    commit = hub.push(NAME, tiny)
    folder = write_run(tmp_path, real=True, plugins=PLUGINS, train=TRAIN)
    dry = turnwise(folder, hub, "train", "run.yaml", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert f"{NAME} at {commit[:12]}" in dry.stdout
    assert not [each for each in hub.downloads() if "safetensors" in each]

    first = turnwise(folder, hub, "train", "run.yaml", "--out", "out")
    assert first.returncode == 0, first.stderr
    assert len([each for each in hub.downloads() if "safetensors" in each]) == 1
    assert saved_model(folder / "out")["commit"] == commit

    hub.push(NAME, {"config.json": b"{}"})
    hub.requests.clear()
    more = turnwise(folder, hub, "train", "run.yaml", "train.num_steps=2", "--out", "out", "--resume")
    assert more.returncode == 0, more.stderr
    assert saved_model(folder / "out")["commit"] == commit
    assert turnwise(folder, hub, "export", "out", "--to", "exported").returncode == 0
    assert hub.requests == []
    assert f"`{NAME}`" in (folder / "exported" / "README.md").read_text(encoding="utf-8")


def test_fine_tuning_takes_an_id(tmp_path, tiny, hub):
    """`convert` downloads the tokenizer and `sft` the weights; a resumed training keeps its commit."""
    commit = hub.push(NAME, tiny, "main", "v1")
    folder = write_run(tmp_path)
    rows = [{"messages": [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}]}]
    (folder / "tune.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model = ("--model", NAME, "--revision", "v1")
    rows_made = turnwise(folder, hub, "convert", "tune.jsonl", "--to", "sft", *model, "--out", "sft.parquet")
    assert rows_made.returncode == 0, rows_made.stderr
    assert not (snapshot(folder, commit) / "model.safetensors").exists()

    tuned = turnwise(folder, hub, "sft", "sft.parquet", *model, "--out", "tuned")
    assert tuned.returncode == 0, tuned.stderr
    assert json.loads((folder / "tuned" / "sft.json").read_text())["commit"] == commit
    hub.push(NAME, {"config.json": b"{}"}, "main", "v1")
    again = turnwise(folder, hub, "sft", "sft.parquet", *model, "--out", "tuned", "--resume")
    assert (again.returncode, again.stderr) == (0, "turnwise: tuned: the model is complete\n")
    missing = turnwise(folder, hub, "sft", "sft.parquet", "--model", "acme/none", "--out", "none")
    assert missing.returncode == 2
    assert f"--model: there is no directory '{folder}/acme/none', and {hub.url} shows no model" in missing.stderr


@pytest.mark.ray
def test_the_driver_downloads_for_ray(tmp_path, tiny, hub):
    """The driver downloads before the actors start; two replicas and two workers on its machine ask for nothing."""
    hub.push(NAME, tiny)
    runtime = {"name": "ray", "num_replicas": 2, "num_workers": 2}
    folder = write_run(tmp_path, real=True, runtime=runtime)
    done = turnwise(folder, hub, "rollout", "run.yaml", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert len(read_results(folder / "out")) == 4
    assert len([each for each in done.stderr.splitlines() if "downloading the model" in each]) == 1
    heads = [each for each in hub.requests if each.startswith("HEAD ")]
    assert len(heads) == len({*heads}) == 6
