"""The model, and the folder that it is kept in."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def tiny_qwen3(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 128,
    intermediate_size: int = 128,
    num_layers: int = 4,
    head_dim: int = 64,
) -> Qwen3ForCausalLM:
    """
    Return a randomly initialised Qwen3 in float32, with tied embeddings and 4 heads that share 2 heads of keys.

    Args:
        tokenizer: whose vocabulary it reads and writes, and whose longest sequence it takes.
        hidden_size: width of the residual stream.
        intermediate_size: width inside a feed-forward layer.
        num_layers: of attention and feed-forward each.
        head_dim: width of a head.
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


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configs, tokenizer and chat template to a folder, which is made where there is none."""
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
    # The tokenizer's class by the name that transformers 4 knows too.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # safetensors makes a file that its owner alone can read; an installed package is read by everybody.
    (folder / "model.safetensors").chmod(0o644)
