"""The trainer in this process: weights for the engine, exports, and memory that moves off the device and back."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from turnwise.weights.sources import source_of
from turnwise_grpo_trainer.config import AlgorithmConfig, LoraConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.processes import trainers
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, load_local_trainer
from turnwise_testing.probes.mapped_files import resident_bytes

CONFIG = TrainConfig(optimizer=OptimizerConfig(lr=1e-2), policy=PolicyConfig(device="cpu"))
GAE = evolve(CONFIG, algorithm=AlgorithmConfig(adv_estimator="gae", kl_loss_coef=0.1))
LORA = evolve(CONFIG, lora=LoraConfig(rank=4), algorithm=AlgorithmConfig(kl_loss_coef=0.1))


def load(spec, config=CONFIG):
    """Return a trainer."""
    return load_local_trainer(LearnerSpec(config, spec, 1.0, 64))


def test_the_engine_gets_the_updated_weights(spec, mixed):
    """The engine gets the policy's weights after the update, by their Hugging Face names, tied ones once."""
    trainer = load(spec)
    before = dict(trainer.weights())
    before = {name: tensor.clone() for name, tensor in before.items()}

    trainer.update(mixed, step=1, version=0)

    after = dict(trainer.weights())
    assert before.keys() == after.keys()
    assert "lm_head.weight" not in after
    assert all((before[name] != after[name]).any() for name in after)
    model = AutoModelForCausalLM.from_pretrained(spec.path)
    assert after.keys() == {name for name, _ in model.named_parameters()}


def test_weights_keep_their_data_type(spec):
    """bfloat16 weights are sent as bfloat16."""
    trainer = load(spec, evolve(CONFIG, policy=PolicyConfig(device="cpu", dtype="bfloat16")))

    assert {torch.bfloat16} == {tensor.dtype for _, tensor in trainer.weights()}


def test_weights_are_described_before_they_are_read(spec, mixed):
    """Readers can plan memory for them; each iteration has the values of its time, and lends the trainer's tensors."""
    trainer = load(spec)
    source = trainer.weights()
    first = {name: tensor.clone() for name, tensor in source}
    trainer.update(mixed, step=1, version=0)
    second = dict(source)

    assert source_of(second).specs == source.specs
    assert all((first[name] != second[name]).any() for name in first)
    parameters = dict(trainer.learner.policy.model.named_parameters())
    assert all(parameters[name].data_ptr() == tensor.data_ptr() for name, tensor in source)


def test_an_export_is_a_model_directory(spec, mixed, tmp_path):
    """`from_pretrained` reads the trained weights; tokenizer files are copied, and other files are not."""
    for name in ("tokenizer.json", "chat_template.jinja", "vocab.txt", "notes.md"):
        (tmp_path / name).write_text("{}")
    for file in spec.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    trainer = load(evolve(spec, path=tmp_path))
    trainer.update(mixed, step=1, version=0)

    trainer.export(tmp_path / "out")

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = dict(exported.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.weights())
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "vocab.txt", "config.json"} <= files
    assert not {"notes.md"} & files


@pytest.mark.parametrize("config", [CONFIG, GAE, LORA], ids=["grpo", "gae with reference", "lora with reference"])
def test_offloading_changes_no_update(spec, mixed, config):
    """A trainer that is offloaded between its updates learns the same bits, any number of times."""
    plain, offloaded = load(spec, config), load(spec, config)
    for step in (1, 2, 3):
        plain.update(mixed, step=step, version=0)
        for _ in range(2):
            offloaded.offload_optimizer()
            offloaded.offload_parameters()
        offloaded.onload()
        offloaded.update(mixed, step=step, version=0)

    expected = dict(plain.weights())
    assert all((array == expected[name]).all() for name, array in offloaded.weights())


def test_offloading_returns_memory(spec, mixed, monkeypatch):
    """After each part has left a device, the allocator's free blocks go back: the engine may be another process."""
    trainer = load(spec)
    trainer.update(mixed, step=1, version=0)
    calls = []
    monkeypatch.setattr(trainers, "return_freed_memory", lambda: calls.append("returned"))
    monkeypatch.setattr(trainer.learner.policy.model, "to", lambda device: calls.append(f"weights to {device}"))

    trainer.offload_optimizer()
    trainer.offload_parameters()

    assert calls == ["returned", "weights to cpu", "returned"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages were written")
def test_frozen_weights_leave_memory(spec, mixed, tmp_path):
    """A new or offloaded trainer of adapters has no page of the model's file in memory: an engine has the weights."""
    folder = shutil.copytree(spec.path, tmp_path / "model")  # other tests map the fixture's file
    trainer = load(evolve(spec, path=folder), LORA)
    assert 0 == resident_bytes(folder / "model.safetensors")
    trainer.update(mixed, step=1, version=0)
    assert resident_bytes(folder / "model.safetensors") > 0

    trainer.offload_optimizer()
    trainer.offload_parameters()

    assert 0 == resident_bytes(folder / "model.safetensors")


def test_memory_counts_every_model(spec, mixed):
    """Weights count from the start, two moments of AdamW after an update, and reference and critic as well."""
    trainer = load(spec)
    weights = sum(parameter.nbytes for parameter in trainer.learner.policy.model.parameters())
    assert weights == trainer.memory_bytes()

    trainer.update(mixed, step=1, version=0)
    assert 3 * weights == trainer.memory_bytes()

    assert load(spec, GAE).memory_bytes() > 2 * weights


def test_a_saved_trainer_is_restored(spec, mixed, tmp_path):
    """`save` and `load` restore weights and optimizer states: the next update is the same."""
    first, second = load(spec), load(spec)
    first.update(mixed, step=1, version=0)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")

    for trainer in (first, second):
        trainer.update(mixed, step=2, version=1)

    expected = dict(first.weights())
    assert all((array == expected[name]).all() for name, array in second.weights())
