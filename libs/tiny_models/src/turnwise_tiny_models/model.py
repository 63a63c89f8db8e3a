"""Builds the model and writes its checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def tiny_qwen3(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 128,
    intermediate_size: int = 128,
    num_layers: int = 4,
    head_dim: int = 64,
) -> Qwen3ForCausalLM:
    """
    Return a randomly initialised float32 Qwen3 with tied embeddings, 4 attention heads and 2 key-value heads.

    Args:
        tokenizer: sets the vocabulary size and the context length.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layers.
        num_layers: transformer layers.
        head_dim: width of an attention head.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configs, tokenizer and chat template to a folder; creates the folder if it is missing."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that transformers 4 does not know.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # safetensors restricts the file to its owner, but every user must be able to read an installed package.
    (folder / "model.safetensors").chmod(0o644)
