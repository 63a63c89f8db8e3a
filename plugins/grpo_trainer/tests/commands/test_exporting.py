"""`turnwise export`: any checkpoint of a training becomes a folder that transformers loads."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from attrs import define, field
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.cli import main
from turnwise.models.gguf import cache_folder
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Resources
from turnwise_grpo_trainer.build import build_learner_spec
from turnwise_grpo_trainer.commands.export_command import ExportCommand
from turnwise_grpo_trainer.learner.model_state import save_state
from turnwise_grpo_trainer.loop.checkpoints import CheckpointStore, TrainingState
from turnwise_grpo_trainer.processes.sharding import load_local_trainer
from turnwise_grpo_trainer.report.run_config import load_saved_config, save_config
from turnwise_grpo_trainer.train_setup import read_setup

EXAMPLE = str(Path(__file__).parents[4] / "examples/train_calculator.yaml")


def held_out(reward):
    """Return the metrics of a validation."""
    return {"validation/reward/mean": reward, "validation/reward/low": reward - 0.1, "validation/reward/high": 1.0}


@define(eq=False)
class FakeTraining:
    """A training that adds its step to every weight."""

    trainer: object
    step: int = 0
    kept_step: int | None = 2
    initial: dict = field(factory=dict)

    def go_to(self, step):
        model = self.trainer.learner.policy.model
        with torch.no_grad():
            for name, weight in model.named_parameters():
                self.initial.setdefault(name, weight.clone())
                weight.copy_(self.initial[name] + step)
        self.step = step

    def save_models(self, folder):
        save_state(self.trainer.learner, folder)

    def state_dict(self):
        validations = {0: held_out(0.4), 2: held_out(0.9), 4: held_out(0.6)}
        return TrainingState(
            progress={"validations": [[step, each] for step, each in validations.items() if step <= self.step]}
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training with checkpoints after steps 2, 4 and 5, of which the first is the best."""
    out = tmp_path_factory.mktemp("run")
    setup = read_setup(EXAMPLE, ("train.policy.device=cpu",))
    save_config(setup.run, out)
    training = FakeTraining(load_local_trainer(build_learner_spec(setup)))
    for step in (2, 4, 5):
        training.go_to(step)
        CheckpointStore(out, keep_last=2).save(training)
    return out, training.initial


@pytest.mark.parametrize(
    ("arguments", "step"),
    [((), 5), (("--checkpoint", "best"), 2), (("--checkpoint", "4"), 4)],
)
def test_the_folder_is_loaded_by_transformers(trained, tmp_path, capsys, arguments, step):
    """Model and tokenizer load without any option, with the weights of the chosen checkpoint."""
    out, initial = trained
    folder = tmp_path / "models" / "calculator"

    assert 0 == main(["export", str(out), "--to", str(folder), *arguments])

    assert f"wrote {folder}: the model after step {step} of {out}\n" == capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {name: (weight - initial[name]).abs().max().item() for name, weight in model.named_parameters()} == (
        pytest.approx(dict.fromkeys(initial, step), abs=1e-5)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("What is 2 + 3?", return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    assert not list(folder.parent.glob("*.partial"))


def test_the_model_card(trained, tmp_path):
    """The card has the origin, the held-out results up to the step with intervals, and a config without folders."""
    out, _ = trained
    folder = tmp_path / "calculator"
    assert 0 == main(["export", str(out), "--to", str(folder), "--checkpoint", "best"])

    text = (folder / "README.md").read_text()

    _, header, body = text.split("---\n", 2)
    assert {"library_name": "transformers", "pipeline_tag": "text-generation"}.items() <= yaml.safe_load(header).items()
    num_steps = yaml.safe_load(Path(EXAMPLE).read_text())["train"]["num_steps"]
    assert f"after step 2 of {num_steps} of a training with turnwise" in body
    assert "| reward | 0.400 [0.300, 1.000] | 0.900 [0.800, 1.000] |" in body
    assert "0.600" not in body
    config = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert (num_steps, 8) == (config["train"]["num_steps"], config["rollout"]["n"])
    assert "train_calculator.jsonl" == config["data"]["path"]
    assert str(Path(EXAMPLE).parent) not in text


def test_a_step_without_a_validation_says_so(trained, tmp_path):
    """The results of an earlier step are not shown as those of the exported one."""
    assert 0 == main(["export", str(trained[0]), "--to", str(tmp_path / "model")])

    assert "The last evaluation before the export was after step 4." in (tmp_path / "model" / "README.md").read_text()


def test_another_data_type(trained, tmp_path):
    """`--dtype` converts the weights, and the config of the model says so."""
    assert 0 == main(["export", str(trained[0]), "--to", str(tmp_path / "model"), "--dtype", "bfloat16"])

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {torch.bfloat16} == {weight.dtype for weight in model.parameters()}


def test_only_an_earlier_export_is_replaced(trained, tmp_path, capsys):
    """An existing folder stays as it is without `--overwrite`, and with it unless it is an export or empty."""
    folder = tmp_path / "model"
    folder.mkdir()
    assert 0 == main(["export", str(trained[0]), "--to", str(folder), "--overwrite"])
    capsys.readouterr()

    assert 2 == main(["export", str(trained[0]), "--to", str(folder)])
    assert f"turnwise: error: --to {folder}: exists; name another folder, or add --overwrite\n" == (
        capsys.readouterr().err
    )
    (folder / "old.safetensors").write_text("old")
    assert 0 == main(["export", str(trained[0]), "--to", str(folder), "--overwrite"])
    assert not (folder / "old.safetensors").exists()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode

    (folder / "README.md").write_text("mine")
    assert 2 == main(["export", str(trained[0]), "--to", str(folder), "--overwrite"])
    assert "mine" == (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint", "3"), "--checkpoint 3: expected latest, best, or a step with a checkpoint; known: 2, 4, 5"),
        (("--checkpoint", "last"), "--checkpoint last: expected latest, best"),
        (("--model", "nowhere"), "--model: there is no directory '"),
        (("--model", "nowhere.gguf"), "--model: there is no file '"),
        (("--model", "."), "--model: '"),
    ],
)
def test_bad_input(trained, tmp_path, capsys, arguments, message):
    """A checkpoint or model that does not exist is named in one line, and nothing is written."""
    assert 2 == main(["export", str(trained[0]), "--to", str(tmp_path / "model"), *arguments])

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"turnwise: error: {message}")
    assert [] == list(tmp_path.iterdir())


def test_the_initial_model_may_be_a_gguf_file(trained, tmp_path, monkeypatch):
    """`--model` takes what `model.path` takes; here the folder that the file was converted to is in the cache."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    file = tmp_path / "initial.gguf"
    file.write_bytes(b"GGUF")
    shutil.copytree(load_saved_config(trained[0]).model_spec().path, cache_folder(file))
    assert 0 == main(["export", str(trained[0]), "--to", str(tmp_path / "model"), "--model", str(file)])
    assert (tmp_path / "model/model.safetensors").exists()


def test_another_model(trained, model_dir, tmp_path, capsys):
    """A model that the checkpoint was not trained from is refused in one line."""
    assert 2 == main(["export", str(trained[0]), "--to", str(tmp_path / "model"), "--model", str(model_dir)])

    assert "not a checkpoint of this model" in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())


def test_a_folder_without_a_training(tmp_path, capsys):
    """A folder that holds no training, or one without a checkpoint, is named."""
    assert 2 == main(["export", str(tmp_path), "--to", str(tmp_path / "model")])
    assert f"turnwise: error: {tmp_path}: not the folder of a training: it has no config.yaml\n" == (
        capsys.readouterr().err
    )

    save_config(read_setup(EXAMPLE).run, tmp_path)
    assert 2 == main(["export", str(tmp_path), "--to", str(tmp_path / "model")])
    assert f"turnwise: error: {tmp_path}: has no checkpoint\n" == capsys.readouterr().err


def test_examples_in_the_help():
    """The examples of the help parse."""
    parser = argparse.ArgumentParser()
    ExportCommand(NoConfig(), Resources()).add_arguments(parser)

    lines = [line for line in parser.epilog.splitlines() if line.startswith("  turnwise export")]

    assert ["latest", "best", "40", "latest"] == [parser.parse_args(shlex.split(line)[2:]).checkpoint for line in lines]
