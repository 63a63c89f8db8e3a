"""A policy in training mode computes the same twice: routers of mixtures of experts draw no noise."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from turnwise.protocols import ModelSpec
from turnwise_grpo_trainer.config import PolicyConfig
from turnwise_grpo_trainer.learner.models import load_policy

SIZES = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "sliding_window": None},
}
CONFIGS = {"mixtral": MixtralConfig(**SIZES, router_jitter_noise=0.5)}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_training_mode_draws_nothing(tmp_path, name):
    """The options of the config are for pretraining; in a policy they would add noise to each log-probability."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    model = load_policy(PolicyConfig(device="cpu", share_prefixes=False), ModelSpec(path=tmp_path))
    ids = torch.arange(24).reshape(2, 12)

    assert model.training
    with torch.no_grad():
        first, second = model(input_ids=ids).logits, model(input_ids=ids).logits
        assert torch.equal(first, second)
        assert (first - model.eval()(input_ids=ids).logits).abs().max() < 1e-6
