"""A tiny model that chats in bytes, as a folder, and as a GGUF file in the form of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from turnwise_testing.inputs.tokenizers import byte_tokenizer

_MERGED: Final = ("\u0100", "\u0101")
"""Bytes 0 and 1, as byte-level tokenizers spell them."""


def make_tiny_model(folder: Path, *, head_dim: int = 8, max_context: int = 512) -> Path:
    """Write a Qwen3 of two layers with random weights and a tokenizer of bytes, and return the folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    build: Any = Qwen3ForCausalLM  # not annotated
    build(config).to(torch.float32).save_pretrained(folder)
    return folder


def write_gguf(folder: Path, file: Path, *, architecture: str = "qwen3", quantized: bool = True) -> Path:
    """
    Write the model of a folder, a Qwen3 with a tokenizer of bytes, as a GGUF file.

    Args:
        folder: of `make_tiny_model` with heads of 128, the only size that transformers reads of a Qwen3.
        file: to write.
        architecture: name in the file.
        quantized: matrices have eight bits and the others 32; if not, all have 32.
    """
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer: object = AutoTokenizer.from_pretrained(folder)
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, gguf, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        values = weight.numpy()
        if "embed_tokens" in name:
            values = np.concatenate([values, np.zeros_like(values[:1])])  # of the merged token
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and values.ndim == 2 else gguf.GGMLQuantizationType.F32
        place = names.get_name(name.removesuffix(".weight"))
        writer.add_tensor(f"{place}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, gguf: Any, tokenizer: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.get_added_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "".join(_MERGED)]
    special = {*tokenizer.all_special_tokens, *SPECIAL}
    kinds = [
        gguf.TokenType.CONTROL
        if token in special
        else gguf.TokenType.USER_DEFINED
        if token in added
        else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    # A file without merges is read as one of another kind. These two bytes are in no text.
    writer.add_token_merges([" ".join(_MERGED)])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that users must not spell; the byte tokenizer has more of them."""
