"""
Tagged text as trajectories, so that a model is taught the format by the same layout code that it is sampled with.

The structure is parsed from the response once, as text. The prompt is ids already, and tags in it are left alone. Where
the agent would force a token it is forced here; all else is an action, and what supervised training learns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from turnwise import Tokenizer, Trajectory
from turnwise.record import TokenRecord
from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.tag_ids import tag_ids
from turnwise_parallel_thinking.tagged_text import parse


def trajectory_of(
    prompt_ids: ArrayLike, response: str, tokenizer: Tokenizer, tags: Tags | None = None, *, end: Sequence[int] = ()
) -> Trajectory:
    """
    Return the record that the agent would make if a model wrote this response.

    Args:
        prompt_ids: (P,) ids of the prompt, chat template included.
        response: tagged text.
        tokenizer: of the model; every tag is one of its tokens.
        tags: the agent's.
        end: ids that end the response, such as the end-of-turn id; actions.

    Returns:
        A trajectory whose actions are what is learned; their log-probabilities are 0, for nobody sampled them.

    Raises:
        DataError: the response is not well formed.
        ConfigError: a tag is not one token.
    """
    tags = tags or Tags()
    ids, parsed = tag_ids(tags, tokenizer), parse(response, tags)
    trajectory = Trajectory(prompt_ids)
    for text, block in zip(parsed.texts, parsed.blocks, strict=False):
        _learn(trajectory, [*tokenizer.encode(text), ids.block] if text else [ids.block])
        paths = trajectory.fork(len(block.paths))
        for path, own in zip(paths, block.paths, strict=True):
            path.add_forced(ids.path)
            _learn(path, [*(tokenizer.encode(own) if own else ()), ids.end_path])
        trajectory.join(paths)
        trajectory.add_forced(ids.join)
        _learn(trajectory, [*(tokenizer.encode(block.summary) if block.summary else ()), ids.end_summary])
    last = parsed.texts[-1]
    _learn(trajectory, [*(tokenizer.encode(last) if last else ()), *end])
    return trajectory


def _learn(record: TokenRecord, token_ids: Sequence[int]) -> None:
    record.add_action(np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32))
