"""Demonstrations as token ids, with the mask of what the model writes."""

# ruff: noqa: TID253 - for training only; no hook imports it

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from turnwise_torl_python.config import QUESTION_MARK, TORL_PROMPT
from turnwise_torl_python.demo.problems import Problem
from turnwise_torl_python.demo.solver import Turn


def prompt_text(problem: Problem) -> str:
    """Return ToRL's plain prompt of a problem."""
    return TORL_PROMPT.replace(QUESTION_MARK, problem.question)


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """Return the ids of a demonstration and, of the same length, whether the model writes the token."""
    parts = [(prompt_text(problem), False)]
    for turn in turns:
        parts.append((turn.text if turn.output is not None else turn.text + "<|im_end|>", True))
        if turn.output is not None:
            parts.append((f"\n{turn.output}\n```\n", False))
    ids: list[int] = []
    mask: list[bool] = []
    for text, is_action in parts:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [is_action] * len(piece)
    return ids, mask
