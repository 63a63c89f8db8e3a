"""Encodes the tags as token ids."""

from __future__ import annotations

import numpy as np
from attrs import asdict, frozen

from turnwise import Tokenizer
from turnwise.errors import ConfigError
from turnwise.types import TokenArray
from turnwise_parallel_thinking.config import Tags


@frozen
class TagIds:
    """
    Ids of the tags.

    Attributes:
        block: id that opens a block.
        path: (1,) ids that open a path.
        end_path: id that closes a path.
        join: (J,) ids between the last path and the text of the summary.
        end_summary: id that closes a summary.
    """

    block: int
    path: TokenArray
    end_path: int
    join: TokenArray
    end_summary: int


def encode_tags(tags: Tags, tokenizer: Tokenizer) -> TagIds:
    """
    Return the ids of the tags.

    Raises:
        ConfigError: a tag is not one token, or two tags are the same token.
    """
    ids: dict[str, int] = {}
    for name, tag in asdict(tags).items():
        if name == "separator":
            continue
        encoded = tokenizer.encode(tag)
        if len(encoded) != 1:
            raise ConfigError(
                f"tag {tag!r} (tags.{name}) is {len(encoded)} tokens of this model: `turnwise tags MODEL --to FOLDER`"
                " adds it as one token, or set tags that are single tokens"
            )
        ids[name] = encoded[0]
    if len(set(ids.values())) != len(ids):
        raise ConfigError(f"two tags are the same token of this model: {ids}; set tags with different ids")
    separator = tokenizer.encode(tags.separator) if tags.separator else []
    return TagIds(
        block=ids["block"],
        path=np.array([ids["path"]], np.int32),
        end_path=ids["end_path"],
        join=np.array([ids["end_block"], *separator, ids["summary"]], np.int32),
        end_summary=ids["end_summary"],
    )
