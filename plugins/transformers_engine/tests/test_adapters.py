"""Adapters as weight updates: merged into the model's own weights, all or none, and exactly replaced."""

import copy

import numpy as np
import pytest
import torch
import transformers

from turnwise.errors import EngineError
from turnwise.weights.sources import module_source
from turnwise_testing.engines.scenarios import failure_of

MODULE = "model.layers.1.self_attn.q_proj"


def make_adapters(model, seed, rank=4):
    """Return the model with random LoRA layers of peft, and their weights in the form of an update."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.inject_adapter_in_model(config, copy.deepcopy(model))
    weights = {}
    with torch.no_grad():
        for name, module in adapted.named_modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.lora_B["default"].weight.normal_(std=0.1)
                weights[f"{name}.lora_A.weight"] = module.lora_A["default"].weight.detach().clone()
                weights[f"{name}.lora_B.weight"] = 2 * module.lora_B["default"].weight.detach()
    return adapted, weights


@pytest.fixture
def model(tiny_model):
    """The tiny model, as transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def test_each_update_replaces_the_adapters(tiny_model, model, serve, ask, assert_logprobs):
    """The engine agrees with peft's forward pass after each of two updates, and again without any adapter."""
    first, first_weights = make_adapters(model, 1)
    second, second_weights = make_adapters(model, 2)

    async def scenario(engine):
        results = [await engine.generate(ask("base"))]
        for version, weights in enumerate((first_weights, second_weights, module_source(model)), 1):
            source = weights.items() if isinstance(weights, dict) else weights
            await engine.update_weights([(name, each.numpy()) for name, each in source], version)
            results.append(await engine.generate(ask(f"version {version}")))
        return results

    results = serve(tiny_model, scenario)

    for version, (result, expected) in enumerate(zip(results, (model, first, second, model), strict=True)):
        assert (version, 0) == (result.weight_version, result.num_cached_tokens)
        assert_logprobs(result, expected)


def test_adapters_do_not_accumulate(tiny_model, model, serve):
    """After many updates, an adapter of zeros leaves the weights of the model's file, to the bit."""
    zeros = {name: torch.zeros_like(each) for name, each in make_adapters(model, 0)[1].items()}

    async def scenario(engine):
        for version in range(1, 9):
            weights = make_adapters(model, version, rank=1 + version % 3)[1] if version < 8 else zeros
            await engine.update_weights(list(weights.items()), version)
        return {name: each.clone() for name, each in engine._backend.model.state_dict().items()}

    weights = serve(tiny_model, scenario)

    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())


def test_whole_weights_are_the_new_base(tiny_model, model, other_model, other_weights, serve, ask, assert_logprobs):
    """An adapter applies to the last whole weights, also to those of the same update."""
    adapted, weights = make_adapters(other_model, 3)

    async def scenario(engine):
        await engine.update_weights(make_adapters(model, 1)[1].items(), 1)
        await engine.update_weights(other_weights, 2)
        await engine.update_weights(weights.items(), 3)
        apart = await engine.generate(ask("apart"))
        await engine.update_weights(make_adapters(model, 1)[1].items(), 4)
        await engine.update_weights([*other_weights, *weights.items()], 5)
        return apart, await engine.generate(ask("together"))

    for result in serve(tiny_model, scenario):
        assert_logprobs(result, adapted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{MODULE}.lora_B.weight": None}, f"the adapter of '{MODULE}.weight' has no lora_B.weight"),
        ({f"{MODULE}.lora_B.weight": np.zeros((32, 3), np.float32)}, r"shapes \(\(4, 32\), \(32, 3\)\), which do not"),
        ({f"{MODULE}.lora_A.weight": np.zeros(32, np.float32)}, r"which do not fit \(32, 32\)"),
        ({"model.layers.7.mlp.up_proj.lora_A.weight": np.zeros((4, 32), np.float32)}, "the model has no weight 'model"),
    ],
)
def test_a_wrong_adapter_changes_nothing(tiny_model, model, serve, ask, assert_logprobs, change, message):
    """Half an adapter, wrong shapes or an unknown module are refused, and the version before still serves."""
    adapted, good = make_adapters(model, 1)
    bad = {name: each for name, each in (make_adapters(model, 2)[1] | change).items() if each is not None}

    async def scenario(engine):
        await engine.update_weights(good.items(), 1)
        failure = await failure_of(engine.update_weights(bad.items(), 2))
        return failure, await engine.generate(ask())

    failure, result = serve(tiny_model, scenario)

    assert isinstance(failure, EngineError)
    with pytest.raises(EngineError, match=message):
        raise failure
    assert 1 == result.weight_version
    assert_logprobs(result, adapted)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_after_sleep(tiny_model, model, serve, ask, assert_logprobs, level):
    """Level 1 keeps the base. After level 2 adapters alone are refused, and whole weights restore the engine."""
    adapted, weights = make_adapters(model, 1)

    async def scenario(engine):
        await engine.sleep(level)
        await engine.wake_up()
        failure = await failure_of(engine.update_weights(weights.items(), 1)) if level == 2 else None
        whole = list(module_source(model)) if level == 2 else []
        await engine.update_weights([*whole, *weights.items()], 2)
        return failure, await engine.generate(ask())

    failure, result = serve(tiny_model, scenario)

    assert level == 1 or "since sleep level 2: send whole weights first" in str(failure)
    assert_logprobs(result, adapted)
