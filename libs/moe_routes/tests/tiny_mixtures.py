"""Tiny mixtures of experts with random weights, in float64."""

import torch
import transformers

COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
KINDS = {
    # The first layer has no experts.
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 12, "mlp_only_layers": [0], "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 5},
    "olmoe": {"num_experts": 6},
    "gpt_oss": {"num_local_experts": 6, "sliding_window": 16},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def make_model(kind, seed=0):
    """Return a model whose routers have strong preferences, with attention and experts that work in float64."""
    config = transformers.CONFIG_MAPPING[kind](**{**COMMON, **KINDS[kind]})
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.3)
    return model.train()
