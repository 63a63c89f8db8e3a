"""A fixture with a tiny model."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def tiny():
    """Return a random float32 Qwen3 with 280 token ids."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=280, tie_word_embeddings=True, **sizes, **heads, **ends)).eval()
