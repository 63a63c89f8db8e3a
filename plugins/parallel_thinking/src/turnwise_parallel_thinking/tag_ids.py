"""The tags as ids of a tokenizer."""

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
        block: the model's own id that opens a block.
        path: (1,) ids that open a path.
        end_path: the id that closes it.
        join: ids between the last path and the summary.
        end_summary: the id that closes a summary.
    """

    block: int
    path: TokenArray
    end_path: int
    join: TokenArray
    end_summary: int


def tag_ids(tags: Tags, tokenizer: Tokenizer) -> TagIds:
    """
    Look the tags up.

    Raises:
        ConfigError: a tag is not one token, or two are the same.
    """
    ids: dict[str, int] = {}
    for name, tag in asdict(tags).items():
        if name == "separator":
            continue
        encoded = tokenizer.encode(tag)
        if len(encoded) != 1:
            raise ConfigError(
                f"tag {tag!r} (tags.{name}) is {len(encoded)} tokens of this model: add it to the tokenizer as one, or"
                " name tags that are"
            )
        ids[name] = encoded[0]
    if len(set(ids.values())) != len(ids):
        raise ConfigError(f"tags are not told apart by this tokenizer: {ids}")
    separator = tokenizer.encode(tags.separator) if tags.separator else []
    return TagIds(
        block=ids["block"],
        path=np.array([ids["path"]], np.int32),
        end_path=ids["end_path"],
        join=np.array([ids["end_block"], *separator, ids["summary"]], np.int32),
        end_summary=ids["end_summary"],
    )
