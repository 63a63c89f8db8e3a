"""Recorded and forced experts of tiny mixtures of experts."""

import copy

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_mixtures import make_model

from turnwise_moe_routes.forcing import RouteForcer
from turnwise_moe_routes.layers import find_expert_layers
from turnwise_moe_routes.recording import RouteRecorder
from turnwise_moe_routes.shapes import find_shape
from turnwise_testing.references.float64 import float64_throughout

IDS = torch.arange(12).view(2, 6) * 5 % 64


def record(model, shape, forward):
    """Return (N, layers, top_k) experts of the forward passes of a function."""
    recorder = RouteRecorder(shape)
    handles = recorder.attach(model)
    with recorder.recording() as found:
        forward()
    for handle in handles:
        handle.remove()
    return torch.from_numpy(found.routes())


def drawn_routes(model, shape, seed=0):
    """Return (2, 6, layers, top_k) different random experts for each token and layer."""
    generator = torch.Generator().manual_seed(seed)
    size = (*IDS.shape, shape.num_layers, shape.num_experts)
    return torch.rand(size, generator=generator).argsort(-1)[..., : shape.top_k]


def loss_of(model):
    """Return a number that depends on all logits."""
    logits = model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)
    return -logits[:, :-1].gather(-1, IDS[:, 1:, None]).mean()


def gradients(model, forward):
    """Return the loss and the gradients by name."""
    model.zero_grad()
    loss = forward()
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def hard_wired(model, shape, routes):
    """Compute the loss with routers that look the experts up, written without the library."""
    layers = find_expert_layers(model)

    def router(layer):
        def forward(hidden):
            gate = layer.block.gate if hasattr(layer.block, "gate") else layer.block.router
            own = routes[:, :, layer.number].reshape(-1, shape.top_k)
            hidden, weight = hidden.reshape(-1, hidden.shape[-1]), gate.weight
            kind = model.config.model_type
            if kind == "deepseek_v3":
                hidden, weight = hidden.float(), weight.float()
            logits = torch.nn.functional.linear(hidden, weight, getattr(gate, "bias", None))
            if kind == "gpt_oss":
                return logits, logits.gather(1, own).softmax(-1), own
            scores = logits.sigmoid() if kind == "deepseek_v3" else logits.float().softmax(-1)
            weights = scores.gather(1, own)
            if kind == "deepseek_v3":
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor
            elif kind != "olmoe":
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, own

        return forward

    for layer in layers:
        gate = layer.block.gate if hasattr(layer.block, "gate") else layer.block.router
        gate.forward = router(layer)
    try:
        return gradients(model, lambda: loss_of(model))
    finally:
        for layer in layers:
            del (layer.block.gate if hasattr(layer.block, "gate") else layer.block.router).forward


def test_recorded_experts_reproduce_the_pass(model, shape):
    """Forcing what a pass chose changes neither the loss nor a gradient, and layers without experts have no routes."""
    routes = record(model, shape, lambda: loss_of(model))
    dense = sorted({*range(shape.num_layers)} - {layer.number for layer in find_expert_layers(model)})
    assert (routes[:, dense] == -1).all()
    assert len(dense) == (model.config.model_type in ("qwen3_moe", "deepseek_v3"))
    expected = gradients(model, lambda: loss_of(model))
    with RouteForcer(model, shape).forcing(routes.view(*IDS.shape, *routes.shape[1:])):
        found = gradients(model, lambda: loss_of(model))
    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_hard_wired_routers(model, shape, checkpointing):
    """To 1e-9 in float64, of the routers too, also where the backward pass computes the forward pass again."""
    routes = drawn_routes(model, shape)
    with float64_throughout():
        expected = hard_wired(model, shape, routes)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with RouteForcer(model, shape).forcing(routes):
            loss, found = gradients(model, lambda: loss_of(model))
    assert loss == pytest.approx(expected[0], abs=1e-9)
    assert set(found) == set(expected[1])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=0)
    routers = [name for name in found if "gate.weight" in name or "router.weight" in name]
    assert routers
    assert all(found[name].abs().max() > 0 for name in routers)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["qwen3_moe", "mixtral"]), st.integers(0, 99), st.floats(0, 2), st.data())
def test_replay_follows_the_engine(kind, seed, noise, data):
    """With routers that are perturbed as one likes, tokens with routes run them, and others what their router says."""
    model = make_model(kind, seed)
    shape = find_shape(model.config.to_dict())
    engine = record(model, shape, lambda: loss_of(model)).view(*IDS.shape, shape.num_layers, shape.top_k)
    perturbed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in find_expert_layers(perturbed):
            weight = layer.block.gate.weight
            weight += noise * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    # Later tokens see earlier ones, so tokens before the first known one run as in the perturbed model alone.
    known = data.draw(st.integers(0, IDS.shape[1]))
    given_routes = engine.clone()
    given_routes[:, :known] = -1
    forcer = RouteForcer(perturbed, shape)
    own = record(perturbed, shape, lambda: loss_of(perturbed)).view_as(engine)
    with forcer.forcing(given_routes):
        ran = record(perturbed, shape, lambda: loss_of(perturbed)).view_as(engine)
    assert torch.equal(ran[:, known:], engine[:, known:])
    assert torch.equal(ran[:, :known], own[:, :known])
    assert torch.equal(record(perturbed, shape, lambda: loss_of(perturbed)).view_as(engine), own)  # nothing stays


def test_a_copy_records_by_itself(model, shape):
    """A deep copy has the hooks; a recording has only the passes of its own thread."""
    recorder = RouteRecorder(shape)
    recorder.attach(model)
    twin = copy.deepcopy(model)
    loss_of(twin)  # nothing is recorded
    with recorder.recording() as found:
        loss_of(twin)
    assert found.routes().shape == (IDS.numel(), shape.num_layers, shape.top_k)


def test_models_that_are_refused():
    """A dense model has no layers; a router without `topk` is found by the check."""
    dense = transformers.Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.Qwen3ForCausalLM(dense)
    assert find_shape(dense.to_dict()) is None
    mixture = make_model("mixtral")
    shape = find_shape(mixture.config.to_dict())
    RouteForcer(mixture, shape).check()
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no layers of experts whose choices can be replaced"):
        RouteForcer(model, shape).check()
    with pytest.raises(ValueError, match="has no layers of experts whose choices can be read"):
        RouteRecorder(shape).attach(model)

    gate = mixture.model.layers[1].mlp.gate
    inner = gate.forward
    gate.forward = lambda hidden: (*inner(hidden)[:2], inner(hidden)[2].flip(0))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp does not run the experts that its router is given"):
        RouteForcer(mixture, shape).check()
    gate.forward = lambda hidden: (
        None,
        hidden.new_ones(len(hidden), 2),
        torch.zeros(len(hidden), 2, dtype=torch.int64),
    )
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp chose no experts by topk, so they cannot be replaced"):
        RouteForcer(mixture, shape).check()


def test_check_passes(model, shape):
    """All architectures of this file pass the check, which leaves the model as it was."""
    before = loss_of(model)
    RouteForcer(model, shape).check()
    assert torch.equal(loss_of(model), before)
    assert not any("forward" in vars(module) for module in model.modules())
