"""Loading of policy, reference and critic, and the attention masks that they support."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from turnwise import ModelSpec
from turnwise.errors import ConfigError
from turnwise_grpo_trainer.config import PolicyConfig
from turnwise_grpo_trainer.learner.devices import select_device
from turnwise_grpo_trainer.learner.log_probs import token_values
from turnwise_grpo_trainer.learner.micro_batches import collate
from turnwise_grpo_trainer.learner.models import (
    SEGMENTS,
    forward_inputs,
    load_critic,
    load_policy,
    load_reference,
)
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.rows import TokenRows

POLICY = PolicyConfig(device="cpu")


def make_micro_batch(batch, *, packed=False):
    """Return all rows of a batch as one micro-batch."""
    rows = TokenRows.from_batch(batch, compute_loss_mask(batch))
    return collate(rows, range(len(rows)), packed=packed)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no path", "model.path: missing; the trainer needs a model directory"),
        ("no config", "model.path: '.*' is not a model directory: it has no config.json"),
        ("no weights", "model.path: cannot load '.*' for training: OSError: "),
        ("no JSON", "model.path: cannot load '.*' for training: "),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(model_dir, tmp_path, damage, message):
    """The error names the config key, the path and the cause."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "no JSON":
        (folder / "config.json").write_text("{")
    spec = ModelSpec(path=None if damage == "no path" else folder)

    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(POLICY, spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [load_policy, load_reference, load_critic])
def test_each_weight_is_needed(model_dir, tmp_path, load):
    """transformers would fill the gap at random; the head of a critic, which no folder has, is no gap."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if load is load_critic and name.startswith("lm_head."):
            continue  # a critic has none
        others = {other: each for other, each in weights.items() if other != name}
        save_file(others, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(
            ConfigError, match=r"^model\.path: '.*' lacks [12] weights of its model, such as "
        ) as caught:
            load(POLICY, ModelSpec(path=folder))
        # Without the embeddings the head lacks too, if it is tied to them.
        assert str(caught.value).endswith((f"'{name}'", "'lm_head.weight'"))


def test_dropout_is_disabled(model_dir, tmp_path):
    """A model that was trained with dropout gives the same log-probabilities every time, in training mode."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))

    model = load_policy(POLICY, ModelSpec(path=folder))

    assert model.training
    assert {0.0} == {each.attention_dropout for each in model.modules() if hasattr(each, "attention_dropout")}
    ids = torch.arange(10)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_the_reference_is_frozen(spec):
    """The reference has the policy's weights, is in evaluation mode, and gets no gradient."""
    policy, reference = load_policy(POLICY, spec), load_reference(POLICY, spec)

    assert not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert all(torch.equal(one, other) for one, other in zip(policy.parameters(), reference.parameters(), strict=True))


def test_the_critic_starts_at_zero(spec, mixed):
    """Before its first update, the critic's value of every token is 0, and its head can be trained."""
    critic = load_critic(POLICY, spec)
    micro = make_micro_batch(mixed)

    values = token_values(critic, micro)

    assert (len(micro.labels), 0.0) == (len(values), float(values.detach().abs().max()))
    values.sum().backward()
    assert critic.score.weight.grad.abs().max() > 0


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_gradient_checkpointing_is_enabled(spec, load):
    """`policy.gradient_checkpointing` applies to policy and critic."""
    assert load(evolve(POLICY, gradient_checkpointing=True), spec).is_gradient_checkpointing
    assert not load(POLICY, spec).is_gradient_checkpointing


def test_weights_have_the_configured_data_type(spec):
    """`policy.dtype` is the type of all weights, whatever the checkpoint has."""
    model = load_policy(evolve(POLICY, dtype="bfloat16"), spec)

    assert {torch.bfloat16} == {parameter.dtype for parameter in model.parameters()}


def test_attention_without_support_for_paths(spec, mixed, conversations):
    """Flash attention is refused for rows with parallel paths, by name, and accepted for others."""
    model = load_policy(POLICY, spec)
    model.config._attn_implementation = "flash_attention_2"

    with pytest.raises(ConfigError, match="flash_attention_2 does not support parallel paths; use turnwise_segments"):
        forward_inputs(model, make_micro_batch(mixed))
    assert forward_inputs(model, make_micro_batch(conversations))["attention_mask"] is None


def test_the_mask_of_eager_attention_is_added_to_scores(spec, mixed):
    """Eager attention gets 0 for visible tokens and the smallest float for others; sdpa gets a bool mask."""
    micro = make_micro_batch(mixed)
    eager = forward_inputs(load_policy(evolve(POLICY, attn_implementation="eager"), spec), micro)["attention_mask"]
    sdpa = forward_inputs(load_policy(POLICY, spec), micro)["attention_mask"]

    assert torch.bool == sdpa.dtype
    assert {0.0, torch.finfo(torch.float32).min} == {*eager.unique().tolist()}
    assert torch.equal(eager == 0, sdpa)


def test_segment_attention_is_not_for_packed_rows(spec):
    """The two settings exclude each other, and the error names both."""
    config = evolve(POLICY, attn_implementation=SEGMENTS, packed=True)

    with pytest.raises(ConfigError, match=r"train\.policy\.packed: must be false with .*attn_implementation=turnwise"):
        load_policy(config, spec)


def test_segment_attention_needs_its_package(spec, monkeypatch):
    """Without the package, the error names the package to install."""
    monkeypatch.setitem(sys.modules, "turnwise_segment_attention", None)

    with pytest.raises(ConfigError, match=r"turnwise_segments needs turnwise-segment-attention\[transformers\]"):
        load_policy(evolve(POLICY, attn_implementation=SEGMENTS), spec)


@pytest.mark.parametrize(
    ("device", "has_gpu", "expected"), [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu")]
)
def test_the_device(monkeypatch, device, has_gpu, expected):
    """`auto` is a GPU if there is one; any other name is used as it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)

    assert expected == select_device(PolicyConfig(device=device)).type
