"""A tiny model with random weights, whose distributions are nearly even: any text that it may write, it soon writes."""

import torch
import transformers

from turnwise_tiny_models.tokenizer import CHATML, byte_level_tokenizer

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MAX_CONTEXT = 8192


def save_even_model(folder, template=CHATML):
    """Write a model and its tokenizer, whose tags are tokens."""
    texts = ['{"kind": "red", "sold": true, "count": 7}'] * 3
    tokenizer = byte_level_tokenizer(texts, 400, tags=TAGS, chat_template=template, context_length=MAX_CONTEXT)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
