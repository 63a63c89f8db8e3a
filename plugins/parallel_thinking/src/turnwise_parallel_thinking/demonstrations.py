"""
Builds trajectories from tagged text, so supervised training teaches the format under the layout of sampling.

The structure is parsed from the text of the response. The prompt consists of ids already, so tags in it change nothing.
Tokens that the agent would force are forced here too; all other tokens are actions, which supervised training learns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from turnwise import Tokenizer, Trajectory
from turnwise.record.columns import TokenRecord
from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.tag_ids import encode_tags
from turnwise_parallel_thinking.tagged_text import parse_tagged_text


def build_trajectory(
    prompt_ids: ArrayLike, response: str, tokenizer: Tokenizer, tags: Tags | None = None, *, end: Sequence[int] = ()
) -> Trajectory:
    """
    Return the record that the agent would make if a model wrote this response.

    Args:
        prompt_ids: (P,) ids of the prompt, chat template included.
        response: tagged text.
        tokenizer: the model's; every tag is one of its tokens.
        tags: the agent's.
        end: ids that end the response, such as the end-of-turn id; actions.

    Returns:
        A trajectory whose actions are to be learned. Their log-probabilities are 0, because no model sampled them.

    Raises:
        DataError: the response is not well formed.
        ConfigError: a tag is not one token.
    """
    tags = tags or Tags()
    ids, parsed = encode_tags(tags, tokenizer), parse_tagged_text(response, tags)

    def encode(text: str) -> list[int]:
        # Some tokenizers insert a token before every text, also before an empty one.
        return tokenizer.encode(text) if text else []

    trajectory = Trajectory(prompt_ids)
    for text, block in zip(parsed.texts, parsed.blocks, strict=False):
        _add_actions(trajectory, [*encode(text), ids.block])
        paths = trajectory.fork(len(block.paths))
        for path, path_text in zip(paths, block.paths, strict=True):
            path.add_forced(ids.path)
            _add_actions(path, [*encode(path_text), ids.end_path])
        trajectory.join(paths)
        trajectory.add_forced(ids.join)
        _add_actions(trajectory, [*encode(block.summary), ids.end_summary])
    _add_actions(trajectory, [*encode(parsed.texts[-1]), *end])
    return trajectory


def _add_actions(record: TokenRecord, token_ids: Sequence[int]) -> None:
    record.add_action(np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32))
