"""`turnwise export` of a training with adapters: a folder of peft, or the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.types import Capabilities
from turnwise_grpo_trainer.build import build_learner_spec, sends_adapters
from turnwise_grpo_trainer.learner.lora import find_adapters
from turnwise_grpo_trainer.loop.checkpoints import CheckpointStore, TrainingState
from turnwise_grpo_trainer.processes.sharding import load_local_trainer
from turnwise_grpo_trainer.report.run_config import save_config
from turnwise_grpo_trainer.train_setup import read_setup

EXAMPLE = str(Path(__file__).parents[4] / "examples/train_calculator.yaml")
LORA = ("train.policy.device=cpu", "train.lora.rank=2", "train.lora.target_modules=[q_proj, down_proj]")


class FakeTraining:
    """A training with random adapters and the best score at its first step."""

    step, kept_step = 0, 2

    def __init__(self, trainer):
        self.trainer = trainer

    def go_to(self, step):
        torch.manual_seed(step)
        with torch.no_grad():
            for layer in find_adapters(self.trainer.learner.policy.model).values():
                layer.lora_B["default"].weight.normal_(std=0.1)
        self.step = step

    def save_models(self, folder):
        self.trainer.save(folder)

    def state_dict(self):
        return TrainingState(progress={"validations": []})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training, and the logits of its model by step."""
    out = tmp_path_factory.mktemp("run")
    setup = read_setup(EXAMPLE, LORA)
    save_config(setup.run, out)
    training = FakeTraining(load_local_trainer(build_learner_spec(setup)))
    logits = {}
    for step in (2, 4, 5):
        training.go_to(step)
        CheckpointStore(out, keep_last=2).save(training)
        logits[step] = logits_of(training.trainer.learner.policy.model)
    return out, setup.model.path, logits


@torch.no_grad()
def logits_of(model):
    """Return the logits of a few tokens."""
    return model(torch.arange(5, 25)[None]).logits


@pytest.mark.parametrize(("arguments", "step"), [((), 5), (("--checkpoint", "best"), 2)])
def test_adapters(trained, tmp_path, arguments, step):
    """peft applies the folder to the base model; transformers loads both at once, and the tokenizer."""
    from peft import PeftModel

    out, base, logits = trained
    folder = tmp_path / "adapters"
    assert 0 == main(["export", str(out), "--to", str(folder), *arguments])

    on_base = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    for model in (on_base, AutoModelForCausalLM.from_pretrained(folder)):
        torch.testing.assert_close(logits_of(model), logits[step], atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(folder)("2 + 3")["input_ids"]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {each.name for each in folder.iterdir()}
    assert not (folder / "config.json").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (2, 32.0, ["down_proj", "q_proj"]) == (config["r"], config["lora_alpha"], sorted(config["target_modules"]))
    card = (folder / "README.md").read_text()
    assert "library_name: peft" in card
    assert f"The LoRA adapters after step {step} of" in card


@pytest.mark.parametrize(("dtype", "bound"), [(None, 1e-5), ("bfloat16", 0.5)])
def test_merged(trained, tmp_path, dtype, bound):
    """`--merge` writes a model that knows nothing of adapters and computes the same."""
    out, base, logits = trained
    folder = tmp_path / "model"
    assert 0 == main(["export", str(out), "--to", str(folder), "--merge", *(("--dtype", dtype) if dtype else ())])

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.state_dict().keys() == AutoModelForCausalLM.from_pretrained(base).state_dict().keys()
    assert getattr(torch, dtype or "float32") == model.dtype
    torch.testing.assert_close(logits_of(model).float(), logits[5], atol=bound, rtol=0)
    assert "library_name: transformers" in (folder / "README.md").read_text()


def test_nothing_to_merge(tmp_path, capsys):
    """A training without adapters refuses `--merge` in one line."""
    setup = read_setup(EXAMPLE, ("train.policy.device=cpu",))
    save_config(setup.run, tmp_path)
    CheckpointStore(tmp_path).save(FakeTraining(load_local_trainer(build_learner_spec(setup))))

    assert 2 == main(["export", str(tmp_path), "--to", str(tmp_path / "model"), "--merge"])

    line = capsys.readouterr().err.splitlines()[-1]
    assert f"turnwise: error: --merge: the training in {tmp_path} has no adapters; leave the option out" == line


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("train.lora.dropout=0.1",),
            "train.lora.dropout: needs train.algorithm.old_log_probs=recompute, which computes them without dropout",
        ),
        (
            (
                "train.lora.dropout=0.1",
                "train.algorithm.old_log_probs=recompute",
                "train.algorithm.ppo_epochs=2",
                "train.algorithm.target_kl=0.1",
            ),
            "train.algorithm.target_kl: needs train.lora.dropout=0: dropout would count as movement of the policy",
        ),
        (
            ("train.lora.sync=adapters", "memory.mode=hybrid", "memory.level=2"),
            "train.lora.sync: adapters needs memory.level=1: at level 2 the engine loses the weights that they adapt",
        ),
        (("train.lora.rank=0",), "train.lora.rank: must be >= 1: 0"),
        (("train.lora.target_modules=q_proj",), "train.lora.target_modules: expected a list"),
    ],
)
def test_a_wrong_config(capsys, overrides, message):
    """Options that cannot work together are one line each, before anything is loaded."""
    assert 2 == main(["train", EXAMPLE, "--dry-run", *LORA, *overrides])

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"turnwise: error: {EXAMPLE}: {message}")


@pytest.mark.many_cases(3)
@pytest.mark.parametrize(
    ("overrides", "able", "expected"),
    [
        ((), True, True),
        ((), False, False),
        (("train.lora.sync=merged",), True, False),
        (("train.lora.sync=adapters",), True, True),
        (("train.lora.sync=adapters",), False, "the engine 'transformers' does not apply adapters; set it to merged"),
        (("memory.mode=hybrid", "memory.level=1"), True, True),
        (("memory.mode=hybrid", "memory.level=2"), True, False),
    ],
)
def test_engines_get_what_they_can_apply(overrides, able, expected):
    """`auto` sends adapters only to an engine that applies them and keeps its weights; `adapters` is never ignored."""
    setup = read_setup(EXAMPLE, (*LORA, *overrides))
    engine = Capabilities(weight_updates=True, adapter_updates=able)
    if isinstance(expected, bool):
        assert expected == sends_adapters(setup, engine)
        return
    with pytest.raises(ConfigError, match=expected):
        sends_adapters(setup, engine)
