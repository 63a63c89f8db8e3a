"""LoRA: only adapters are trained, saved and sent, and the model is the merged one."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError
from turnwise.weights.sources import as_numpy, source_of
from turnwise_grpo_trainer.config import AlgorithmConfig, LoraConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.lora import adapter_weights, find_adapters, merged_weights
from turnwise_grpo_trainer.learner.model_state import load_state, save_state
from turnwise_grpo_trainer.learner.models import load_policy
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, load_local_trainer

LORA = LoraConfig(rank=4, alpha=12)
CONFIG = TrainConfig(
    num_steps=2, optimizer=OptimizerConfig(lr=1e-2), policy=PolicyConfig(device="cpu"), lora=LORA
)  # a scale that is no power of two


def load(spec, config=CONFIG):
    """Return an untrained learner."""
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))


def whole(tensor):
    """Return the tensor; nothing is sharded here."""
    return tensor


def scatter(model, seed=0):
    """Give the adapters of a model random weights that change its output."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in find_adapters(model).values():
            for part in (layer.lora_A, layer.lora_B):
                part["default"].weight.normal_(std=0.2)


@pytest.fixture
def base(spec):
    """The weights of the model's folder."""
    return {name: weight.clone() for name, weight in load_policy(CONFIG.policy, spec).state_dict().items()}


@given(
    rank=st.integers(1, 9),
    target_modules=st.sampled_from([("all-linear",), ("q_proj",), ("v_proj", "down_proj")]),
    dropout=st.sampled_from([0.0, 0.5]),
    kl=st.sampled_from([0.0, 0.1]),
    packed=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_base_never_changes(spec, conversations, rank, target_modules, dropout, kl, packed, weight_decay):
    """Training changes every adapter and no other weight, to the bit, with every option."""
    config = TrainConfig(
        num_steps=2,
        algorithm=AlgorithmConfig(kl_loss_coef=kl),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=weight_decay),
        policy=PolicyConfig(device="cpu", packed=packed),
        lora=LoraConfig(rank=rank, dropout=dropout, target_modules=target_modules),
    )
    learner = load(spec, config)
    before = copy.deepcopy(learner.policy.model.state_dict())
    for step in (1, 2):
        learner.update(conversations, step=step, version=step - 1)

    changed = {name for name, each in learner.policy.model.state_dict().items() if not torch.equal(each, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    suffixes = ("proj",) if target_modules == ("all-linear",) else target_modules
    assert all(name.partition(".lora_")[0].endswith(suffixes) for name in changed)


def test_the_gradient_is_that_of_the_product(spec, conversations):
    """The first update's gradients are s G A^T and s B^T G, where G is the gradient of the merged weight."""
    gradients = {}
    learners = {}
    for kind, lora in (("adapted", LORA), ("plain", None)):
        learner = learners[kind] = load(spec, evolve(CONFIG, lora=lora))
        found = gradients[kind] = {}
        for name, weight in learner.policy.model.named_parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(
                    lambda each, name=name, found=found: found.update({name: each.grad.clone()})
                )
    scatter(learners["adapted"].policy.model)
    with torch.no_grad():
        for name, weight in merged_weights(learners["adapted"].policy.model, whole):
            learners["plain"].policy.model.state_dict()[name].copy_(weight)
    before = {name: each.clone() for name, each in learners["adapted"].policy.model.state_dict().items()}
    for learner in learners.values():
        learner.update(conversations, step=1, version=0)

    names = find_adapters(learners["adapted"].policy.model).keys()
    assert 14 == len(names)
    for name in names:
        into, out = (before[f"{name}.lora_{part}.default.weight"] for part in "AB")
        full = gradients["plain"][f"{name}.weight"]
        scale = full.norm()
        for part, expected in (("A", 3 * out.T @ full), ("B", 3 * full @ into.T)):
            found = gradients["adapted"][f"{name}.lora_{part}.default.weight"]
            assert (found - expected).norm() < 1e-5 * max(scale, expected.norm())


def test_merged_weights_compute_the_same(spec, conversations, base):
    """Log-probabilities of the adapted and of the merged model agree as those of engine and trainer do: to 1e-5."""
    adapted, plain = load(spec), load(spec, evolve(CONFIG, lora=None))
    scatter(adapted.policy.model)
    merged = dict(adapted.policy.full_weights())
    assert merged.keys() | {"lm_head.weight"} == base.keys()
    assert any((merged[name] - base[name]).abs().max() > 0.1 for name in merged)
    with torch.no_grad():
        for name, weight in merged.items():
            plain.policy.model.state_dict()[name].copy_(weight)

    columns = [log_probs_of(each, each.policy.model, conversations) for each in (adapted, plain)]

    np.testing.assert_allclose(*columns, atol=1e-5, rtol=0)


def log_probs_of(learner, model, batch):
    """Return the log-probabilities of a batch's tokens under a model."""
    from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
    from turnwise_grpo_trainer.objective.rows import TokenRows

    rows = TokenRows.from_batch(batch, compute_loss_mask(batch, mask_truncated=False))
    return learner._compute_column(rows, model, learner._log_probs).numpy()


def test_the_reference_is_the_base(spec, conversations):
    """The policy without its adapters is the initial model to the bit, takes no memory, and leaves them on."""
    config = evolve(CONFIG, algorithm=AlgorithmConfig(kl_loss_coef=0.1))
    adapted, plain = load(spec, config), load(spec, evolve(config, lora=None))
    scatter(adapted.policy.model)
    changed = log_probs_of(adapted, adapted.policy.model, conversations)

    reference = log_probs_of(adapted, adapted.reference, conversations)

    assert (reference == log_probs_of(plain, plain.reference, conversations)).all()
    assert np.abs(reference - changed).max() > 0.1
    assert (changed == log_probs_of(adapted, adapted.policy.model, conversations)).all()
    assert all(weight.requires_grad == (".lora_" in name) for name, weight in adapted.policy.model.named_parameters())
    with_kl = load_local_trainer(LearnerSpec(config, spec, 1.0, 64))
    without = load_local_trainer(LearnerSpec(CONFIG, spec, 1.0, 64))
    assert with_kl.memory_bytes() == without.memory_bytes()


def test_only_adapters_travel(spec, conversations):
    """The engine gets r (in + out) numbers for each adapted module: B A is the trained change of its weight."""
    trainer = load_local_trainer(LearnerSpec(CONFIG, spec, 1.0, 64))
    before = {name: as_numpy(tensor, copy=True) for name, tensor in trainer.weights()}
    trainer.update(conversations, step=1, version=0)
    source = trainer.weights()
    after, adapters = (
        {name: as_numpy(each) for name, each in pairs} for pairs in (source, trainer.weights(adapters=True))
    )
    assert source_of(after).specs == source.specs

    # Queries, keys and values, outputs, and the three products of the feed-forward part.
    sizes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 32), (32, 32), (32, 32)]
    num_bytes = 4 * 2 * sum(LORA.rank * (into + out) for into, out in sizes)
    assert num_bytes == sum(spec.num_bytes for spec in source_of(adapters.items()).specs) == 13312
    assert 55040 == sum(spec.num_bytes for spec in source_of(after.items()).specs)
    for name in {name.partition(".lora_")[0] for name in adapters}:
        change = adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
        assert np.abs(change).max() > 1e-4
        np.testing.assert_allclose(after[f"{name}.weight"], before[f"{name}.weight"] + change, atol=1e-6)


def test_a_checkpoint_has_only_adapters(spec, conversations, tmp_path):
    """A restored learner makes the same update, to the bit, and no file holds a weight of the base."""
    from safetensors import safe_open

    first = load(spec)
    first.update(conversations, step=1, version=0)
    save_state(first, tmp_path / "state")
    first.update(conversations, step=2, version=1)

    second = load(spec)
    load_state(second, tmp_path / "state")
    second.update(conversations, step=2, version=1)

    expected = second.policy.model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in first.policy.model.state_dict().items())
    names = []
    for file in (tmp_path / "state").glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            names += [name for name in opened.keys() if name.startswith("policy.model.")]  # noqa: SIM118 - no mapping
    assert 28 == len(names)
    assert all(".lora_" in name for name in names)


def test_a_checkpoint_of_another_rank_is_refused(spec, tmp_path):
    """The error is one line."""
    save_state(load(spec), tmp_path / "state")

    with pytest.raises(ConfigError, match="not a checkpoint of this model") as caught:
        load_state(load(spec, evolve(CONFIG, lora=LoraConfig(rank=5))), tmp_path / "state")
    assert "\n" not in str(caught.value)


def test_dropout_is_only_in_the_update(spec, conversations):
    """Old log-probabilities have no dropout, and the update does, so the gap between them is not the rounding error."""
    config = evolve(CONFIG, lora=evolve(LORA, dropout=0.5))
    learner = load(spec, config)
    scatter(learner.policy.model)
    first, again = (log_probs_of(learner, learner.policy.model, conversations) for _ in range(2))
    assert (first == again).all()

    plain = load(spec)
    scatter(plain.policy.model)
    assert (first == log_probs_of(plain, plain.policy.model, conversations)).all()
    metrics = learner.update(conversations, step=1, version=0)
    assert metrics["actor/approx_kl"] > 1e-4 > plain.update(conversations, step=1, version=0)["actor/approx_kl"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("qq_proj",), "train.lora.target_modules: Target modules .* not found"),
        (
            ("embed_tokens",),
            "train.lora.target_modules: model.embed_tokens is a Embedding; only linear modules can be adapted; name",
        ),
        (("lm_head",), "train.lora.target_modules: lm_head shares its weight with another module"),
    ],
)
def test_modules_that_cannot_be_adapted(spec, names, message):
    """Unknown, embedding and tied modules are refused in one line."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(CONFIG.policy, spec, LoraConfig(target_modules=names))
    assert "\n" not in str(caught.value)


def test_a_narrow_data_type_keeps_the_scale_exact(spec):
    """In bfloat16, B times a scale that is no power of two travels in float32."""
    config = PolicyConfig(device="cpu", dtype="bfloat16")
    for alpha, dtype in ((8, torch.bfloat16), (12, torch.float32)):
        model = load_policy(config, spec, LoraConfig(rank=4, alpha=alpha))
        scatter(model)
        weights = dict(adapter_weights(model, whole))
        layer = find_adapters(model)["model.layers.0.mlp.up_proj"]
        sent = weights["model.layers.0.mlp.up_proj.lora_B.weight"]
        assert dtype == sent.dtype
        assert torch.equal(sent.float(), layer.lora_B["default"].weight.float() * alpha / 4)


def test_without_peft(spec, monkeypatch):
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(ConfigError, match=r"train.lora needs peft: pip install 'turnwise-grpo-trainer\[lora\]'"):
        load_policy(CONFIG.policy, spec, LORA)
