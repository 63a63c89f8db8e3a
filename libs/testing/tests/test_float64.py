"""Models whose norms, routers and softmax compute in float64, so that small differences stay small."""

import pytest
import torch
import transformers

from turnwise_testing.references.float64 import float64_throughout

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
MIXTURES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
}


@pytest.fixture(params=["llama", "qwen3", "qwen2", "gemma3_text", *MIXTURES])
def model(request):
    """A tiny model in float64."""
    config = transformers.CONFIG_MAPPING[request.param](**SIZES, **MIXTURES.get(request.param, {}))
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager"
    ).eval()


def largest_change(model, size):
    """Return how much the log-probabilities change when the embeddings change by a relative size."""
    generator = torch.Generator().manual_seed(1)
    embeddings = model.get_input_embeddings()(torch.arange(50)[None])
    noise = torch.randn(embeddings.shape, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        one, other = (
            model(inputs_embeds=each, use_cache=False).logits.log_softmax(-1)
            for each in (embeddings, embeddings * (1 + size * noise))
        )
    return float((one - other).abs().max())


def test_a_small_change_has_a_small_effect(model):
    """A change of 1e-9 changes log-probabilities in proportion: a thousandth of a change of 1e-6."""
    with float64_throughout():
        assert largest_change(model, 1e-9) == pytest.approx(largest_change(model, 1e-6) / 1000, rel=1e-3)


def test_without_it_the_effect_is_that_of_float32(model):
    """A control: the change is rounded to float32 on its way."""
    found = largest_change(model, 1e-9)
    with float64_throughout():
        assert found != pytest.approx(largest_change(model, 1e-9), rel=0.1)


def test_names_are_restored():
    """Also after an error."""

    def fail():
        with float64_throughout():
            assert torch.zeros(1).float().dtype == torch.float32 == torch.float64
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.zeros(1).float().dtype == torch.float32 != torch.float64
