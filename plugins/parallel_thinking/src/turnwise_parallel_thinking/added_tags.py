"""Adds tags to the vocabulary and the embeddings of a model."""

# ruff: noqa: TID253 - only the command imports this module; no hook does

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from transformers import AddedToken, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from turnwise.errors import ConfigError
from turnwise.files import atomic_folder, make_parents, share_weights
from turnwise.models.finding import find_model
from turnwise.models.loaded_weights import refuse_missing
from turnwise.models.location import ModelSource
from turnwise_parallel_thinking.config import Tags


def add_tags(source: ModelSource, folder: Path, tags: Tags) -> dict[str, int]:
    """
    Write a model that has each tag as one token.

    Args:
        source: the model.
        folder: appears complete or not at all.
        tags: texts; a tag that is one token already stays as it is.

    Returns:
        The added texts, with their ids.

    Raises:
        ConfigError: the folder exists or cannot be written, there is no such model, it lacks weights, or it has all
            tags.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"--to {folder}: exists; name another folder")
    try:
        make_parents(folder)
    except OSError as error:
        raise ConfigError(f"--to {folder}: {error.strerror}") from error
    found = find_model(source).folder
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it so
    try:
        AutoConfig.from_pretrained(found)  # its error names the missing file; the tokenizer's may not
        tokenizer = AutoTokenizer.from_pretrained(found)
        pieces = find_pieces(tokenizer, tags)
        if not pieces:
            raise ConfigError(
                f"{source.key} {source.path}: each tag is one token of this model already; use it as it is"
            )
        kind: Any = AutoModelForCausalLM  # its types do not know the pair that is returned
        model, info = kind.from_pretrained(found, dtype="auto", output_loading_info=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{source.key} {source.path}: {str(error).splitlines()[0]}") from error
    refuse_missing(f"{source.key} {source.path}: it", info["missing_keys"])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in pieces])
    vocabulary = tokenizer.get_vocab()
    added = {text: int(vocabulary[text]) for text in pieces}
    embed({added[text]: ids for text, ids in pieces.items()}, model, len(tokenizer))
    with atomic_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        share_weights(partial)
    return added


def find_pieces(tokenizer: Any, tags: Tags) -> dict[str, list[int]]:
    """Return the tags that are several tokens, with the ids of these tokens."""
    texts = [text for name, text in asdict(tags).items() if name != "separator"]
    pieces = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    return {text: ids for text, ids in pieces.items() if len(ids) != 1}


@torch.no_grad()
def embed(pieces: Mapping[int, Sequence[int]], model: Any, num_tokens: int) -> None:
    """
    Give new ids the mean embedding of the ids that stood for them, in the input and in the output of a model.

    Args:
        pieces: the earlier ids of each new id.
        model: of transformers; it gets more rows if it has too few. Vocabularies are often padded, so it may have them.
        num_tokens: of the tokenizer.
    """
    if model.get_input_embeddings().weight.shape[0] < num_tokens:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    tables = {id(layer.weight): layer for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    for layer in tables.values():
        for tensor in (layer.weight, getattr(layer, "bias", None)):
            if tensor is not None:
                rows = {token_id: tensor[list(ids)].float().mean(0) for token_id, ids in pieces.items()}
                for token_id, row in rows.items():
                    tensor[token_id] = row.to(tensor.dtype)
